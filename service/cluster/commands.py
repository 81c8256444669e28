"""The commands for clusters: render, submit, status, logs, list, cancel."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from service.errors import EXIT_FINISHED, UserError

if TYPE_CHECKING:
    from service.cluster.job import Job

AddCommand = Callable[[Any, str, str, Callable[[argparse.Namespace], int]], Any]
AddOptions = Callable[[Any], None]
RENDERED = ("slurm", "kubernetes")
COMMANDS = ("render", "submit", "status", "logs", "list", "cancel")
PLACES = ("slurm", "kubernetes", "docker", "local")


def add_commands(commands: Any, add_command: AddCommand, add_config_options: AddOptions) -> None:
    """Add the commands to the parser; the two functions are the command line's own."""
    text = "print the batch script or the manifests that submit would send"
    parser = add_command(commands, "render", text, _render)
    parser.add_argument("scheduler", choices=RENDERED, metavar="slurm|kubernetes")
    add_config_options(parser)
    add_job_options(parser)

    parser = add_command(commands, "submit", "submit a run to a cluster, and print its handle", _submit)
    _add_place(parser)
    add_config_options(parser)
    add_job_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and exit")

    for name, text, run in (
        ("status", "print the state of a job", _status),
        ("logs", "print the log of a job's node", _logs),
        ("cancel", "cancel a job; it saves before it ends, where there is time", _cancel),
    ):
        parser = add_command(commands, name, text, run)
        parser.add_argument("handle", metavar="HANDLE", help="what submit printed")
        if name == "logs":
            parser.add_argument("--node", type=int, default=0, metavar="K", help="node, from 0 (0)")
            parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    _add_place(add_command(commands, "list", "list the jobs on a cluster", _list))


def _add_place(parser: Any) -> None:
    parser.add_argument("--on", required=True, choices=PLACES, metavar="|".join(PLACES))


def add_job_options(parser: Any) -> None:
    """What describes a job beside its configuration."""
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes; overrides cluster.nodes")
    parser.add_argument("--name", metavar="TEXT", help="the job's name; default: run.name")
    parser.add_argument("--seeds", metavar="0,1,2", help="Slurm: an array of runs, one for each seed")
    parser.add_argument("--after", metavar="JOB", help="Slurm: start after this job or handle has succeeded")


def job_of(options: argparse.Namespace) -> Job:
    """The job that the command line describes."""
    from service.cluster.job import make_job
    from service.config.load import load_config

    if options.config is None:
        raise UserError("--config is missing, e.g. --config base (see hiera-train config --help)")
    try:
        seeds = tuple(int(seed) for seed in options.seeds.split(",")) if options.seeds else ()
    except ValueError:
        raise UserError(f"--seeds: {options.seeds!r} is not a list of whole numbers, e.g. 0,1,2") from None
    after = options.after.rsplit("/", 1)[-1] if options.after else None
    if after is not None and not after.replace("_", "").isdigit():
        raise UserError(f"--after: {options.after!r} is neither the id of a Slurm job nor a handle of one")
    config = load_config(options.config, options.overrides)
    return make_job(config, nodes=options.nodes, name=options.name, seeds=seeds, after=after)


def render_text(job: Job, scheduler: str) -> str:
    """What this scheduler would be sent."""
    if scheduler == "slurm":
        from service.cluster import slurm

        return slurm.render(job)
    from service.cluster import kubernetes

    return kubernetes.render(job)


def _render(options: argparse.Namespace) -> int:
    print(render_text(job_of(options), options.scheduler), end="")
    return EXIT_FINISHED


def _submit(options: argparse.Namespace) -> int:
    job = job_of(options)
    config = job.config
    if options.on in RENDERED and options.dry_run:
        print(render_text(job, options.on), end="")
        return EXIT_FINISHED
    if options.on == "slurm" and config.data.kind != "synthetic" and config.data.path is None:
        raise UserError("data.path: null; give the training data with --set data.path=FOLDER")
    from service.cluster import front

    overrides = tuple(options.overrides)
    if options.nodes is not None:
        overrides += (f"cluster.nodes={options.nodes}",)
    return front.submit(job, options.on, options.config, overrides, dry_run=options.dry_run)


def _status(options: argparse.Namespace) -> int:
    from service.cluster import front

    return front.status(options.handle)


def _logs(options: argparse.Namespace) -> int:
    from service.cluster import front

    return front.logs(options.handle, options.node, follow=options.follow)


def _list(options: argparse.Namespace) -> int:
    from service.cluster import front

    return front.list_jobs(options.on)


def _cancel(options: argparse.Namespace) -> int:
    from service.cluster import front

    return front.cancel(options.handle)
