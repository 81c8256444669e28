"""`hiera-train`: reads the command line, and hands over to the launcher or to one of the tools.

Nothing heavy is imported before it is known to be needed: help and the config commands answer within
half a second, without torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from service import streams
from service.cluster.commands import COMMANDS as CLUSTER_COMMANDS
from service.cluster.commands import add_commands
from service.errors import EXIT_FAILED, EXIT_FINISHED, UserError
from service.launch.processes import LAUNCHER_SIGNALS

PROGRAM = "hiera-train"
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it. A run that is interrupted exits as the launcher says instead."""
_COMMANDS = ("run", "config", "reconstruct", "export", *CLUSTER_COMMANDS)

_USAGE = """\
%(prog)s [run] --config FILE [--set SECTION.FIELD=VALUE ...] [--dry-run]
       %(prog)s COMMAND [-h] ..."""
_EXAMPLES = """\
examples:
  hiera-train --config quickstart                            a first run, on the CPU, in minutes
  hiera-train --config base --set data.path=~/pictures       pre-train Hiera-B; the same command resumes
  hiera-train --config base --set data.path=~/pictures --dry-run
  hiera-train config show base                               every setting, resolved
  hiera-train reconstruct runs/quickstart                    pictures: original, masked, reconstructed
  hiera-train export runs/quickstart --to hiera.safetensors  weights for FAIR's own classes
  hiera-train render slurm --config base --nodes 4           the batch script of a run on four nodes
  hiera-train submit --on slurm --config base --nodes 4      submit it; then status, logs, list, cancel

exit codes: 0 finished, 75 stopped on request (the same command resumes), 78 wrong configuration or input,
70 training failed for good (e.g. non-finite loss), 1 any other failure (a retry may help).
"""


class _Parser(argparse.ArgumentParser):
    """Mistakes on the command line end like all mistakes of the user: one line and exit code 78."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; a mistyped option is named before what it leaves missing."""
        options = self._option_string_actions
        # Those of a command are looked at by the command's own parser. No value may begin with a dash and a letter.
        for word in () if self._subparsers else args or ():
            name = word.partition("=")[0]
            if re.match("--?[A-Za-z]", name) and name not in options:
                near = difflib.get_close_matches(name, options, n=1)
                if near:
                    raise UserError(f"unknown option {name}; did you mean {near[0]}?")
                self.error(f"unknown option {name}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near = difflib.get_close_matches(str(value), action.choices or (), n=1)
        if near and value not in (action.choices or ()):
            raise argparse.ArgumentError(action, f"unknown: {value}; did you mean {near[0]}?")
        super()._check_value(action, value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and prints what went wrong to stderr."""
    streams.open_standard_files()
    words = list(sys.argv[1:] if arguments is None else arguments)
    mask = None
    if (not words or words[0] == "run" or words[0] not in _COMMANDS) and "--dry-run" not in words:
        # Loading the launcher takes most of a second: until it has its handlers, a stop request waits. A process of its
        # own never lets go again, so that nothing that comes on its way out can change its exit code.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        streams.say(f"{PROGRAM}: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        streams.say(f"{PROGRAM}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has all that it wanted.
        return EXIT_FINISHED
    except OSError as error:
        # Without a file's name it comes from standard output.
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        streams.say(f"{PROGRAM}: error: standard output: {error.strerror}")
        return EXIT_FAILED
    finally:
        streams.settle()
        if mask is not None and arguments is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        raise UserError(f"--config is missing, e.g. {PROGRAM} --config quickstart (see {PROGRAM} --help)")
    if arguments[0] not in _COMMANDS and arguments[0] not in ("-h", "--help", "--version"):
        if not arguments[0].startswith("-"):
            raise UserError(f"unknown command {arguments[0]}; {_hint(arguments[0])}")
        arguments = ["run", *arguments]
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _hint(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if word in _shipped() or word.endswith((".yaml", ".yml")):
        return f"to train with this configuration: {PROGRAM} --config {word}"
    return f"commands: {', '.join(_COMMANDS)}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage=_USAGE,
        description="Pre-train Hiera as a masked autoencoder. Without a command: run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=PROGRAM)
    _add_run(commands)
    _add_config(commands)
    _add_reconstruct(commands)
    _add_export(commands)
    add_commands(commands, _add_command, _add_config_options)
    return parser


def _add_command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Any:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    return parser


def _add_config_options(parser: Any) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file, or the name of a shipped configuration: " + ", ".join(_shipped()),
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override one setting; may be repeated. Lists: 448,448; nothing: null",
    )


def _add_run(commands: Any) -> None:
    parser = _add_command(commands, "run", "train, or go on with a run that was stopped (the default)", _run)
    _add_config_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would run, and exit")
    nodes = parser.add_argument_group(
        "several nodes",
        "start the same command on every node; what is left out is taken from the variable beside the flag,\n"
        "then from what Slurm or Kubernetes set",
    )
    nodes.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes (HIERA_NNODES; 1)")
    nodes.add_argument("--node-rank", type=int, metavar="R", help="this node, 0 to N-1 (HIERA_NODE_RANK)")
    nodes.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet: node 0 (HIERA_RDZV_ENDPOINT)"
    )


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="show or check a configuration, or print the schema")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, run in (
        ("show", "print the whole resolved configuration as YAML", _config_show),
        ("check", "check a configuration and its data without starting anything", _config_check),
    ):
        verb = _add_command(verbs, name, text, run)
        verb.add_argument("file", nargs="?", metavar="FILE", help="the same as --config FILE")
        _add_config_options(verb)
    _add_command(verbs, "schema", "print the JSON schema of the configuration", _config_schema)


def _add_reconstruct(commands: Any) -> None:
    text = "draw held-out samples of a run: original, masked, reconstructed"
    parser = _add_command(commands, "reconstruct", text, _reconstruct)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory, e.g. runs/quickstart")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default: the newest whole one")


def _add_export(commands: Any) -> None:
    text = "write a run's weights for FAIR's own classes, loadable strictly"
    parser = _add_command(commands, "export", text, _export)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory, e.g. runs/quickstart")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="FILE.pth or FILE.safetensors")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default: the newest whole one")


def _run(options: argparse.Namespace) -> int:
    from service.config.checks import check_all, check_world
    from service.config.load import load_config
    from service.launch.rendezvous import resolve

    if options.config is None:
        raise UserError(f"--config is missing; shipped configurations: {', '.join(_shipped())}")
    rendezvous = resolve(options.nnodes, options.node_rank, options.rdzv_endpoint, os.environ)
    nnodes = 1 if rendezvous is None else rendezvous.nnodes
    config = load_config(options.config, options.overrides)
    check_all(config)
    if isinstance(config.runtime.nproc_per_node, int):
        check_world(config, nnodes * config.runtime.nproc_per_node)
    if options.dry_run:
        from service.config.summary import summary

        print("\n".join(summary(config, nnodes)))
        return EXIT_FINISHED
    from service.launch.launcher import run

    code: int = run(
        config,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        rdzv_endpoint=options.rdzv_endpoint,
    )
    return code


def _config_show(options: argparse.Namespace) -> int:
    from service.config.load import dump_config, load_config

    print(dump_config(load_config(_source(options), options.overrides)), end="")
    return EXIT_FINISHED


def _config_check(options: argparse.Namespace) -> int:
    from service.config.checks import check_all
    from service.config.load import load_config
    from service.config.summary import summary

    config = load_config(_source(options), options.overrides)
    check_all(config)
    print("\n".join(summary(config, 1)))
    return EXIT_FINISHED


def _config_schema(_: argparse.Namespace) -> int:
    from service.config.schema import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=2))
    return EXIT_FINISHED


def _reconstruct(options: argparse.Namespace) -> int:
    _check_run_directory(options.run_dir)
    from service.train.reconstruct import main as reconstruct

    return int(reconstruct(options.run_dir, step=options.step))


def _export(options: argparse.Namespace) -> int:
    from service.config.checks import WEIGHT_SUFFIXES

    _check_run_directory(options.run_dir)
    if options.to.suffix not in WEIGHT_SUFFIXES:
        raise UserError(f"--to: {options.to} must end in {' or '.join(WEIGHT_SUFFIXES)}")
    if not options.to.absolute().parent.is_dir():
        raise UserError(f"--to: the directory {options.to.absolute().parent} does not exist")
    from service.train.export import main as export

    return int(export(options.run_dir, options.to, options.step))


def _source(options: argparse.Namespace) -> str:
    if options.file is not None and options.config is not None:
        raise UserError(f"two configurations: {options.file} and --config {options.config}; give one")
    source: str | None = options.file or options.config
    if source is None:
        raise UserError(f"--config is missing; shipped configurations: {', '.join(_shipped())}")
    return source


def _check_run_directory(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a run directory, e.g. runs/quickstart")
    if not (path / "run.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no run.yaml")


def _shipped() -> list[str]:
    from service.config.shipped import shipped_configs

    return list(shipped_configs())


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hiera-train")
    except metadata.PackageNotFoundError:
        return "(not installed)"
