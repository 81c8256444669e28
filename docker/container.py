#!/opt/venv/bin/python
"""What `docker run hiera-train ...` starts: the command line, with what only a container needs around it.

Before a run it looks at what is mounted: data at /data is taken when the configuration names none, and what
is missing is said in one line with the option of `docker run` that brings it. After a run that failed it says
when the cause was the container's memory limit. Everything else is `hiera-train` itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from service import cli
from service.config.load import load_config
from service.config.schema import BUILTIN, RunConfig
from service.config.shipped import find_config
from service.errors import EXIT_FAILED, UserError
from service.launch import caches, hardware

DATA = Path("/data")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
LEAST_MEMORY = 640 * MIB
"""The launcher, torchrun and one worker take 610 MiB (measured) before a model is made: torch is in two of them."""
LEAST_SHARED_MEMORY = 1024 * MIB
"""NCCL moves data between GPUs of one node through /dev/shm where it cannot reach the other GPU's memory."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line in a container; returns the exit code."""
    given = list(arguments)
    try:
        given = prepare(given)
    except UserError as error:
        print(f"{cli.PROGRAM}: error: {error}", file=sys.stderr)
        return error.exit_code
    killed_before = memory_kills(CONTROL_GROUPS)
    code = cli.main(given)
    if code == EXIT_FAILED and memory_kills(CONTROL_GROUPS) > killed_before:
        limit = memory_limit(CONTROL_GROUPS)
        now = f" (now {limit // MIB} MiB)" if limit else ""
        say(f"the kernel ended a process for want of memory: raise --memory{now} or lower train.micro_batch")
    return code


def say(text: str) -> None:
    """One line to the user."""
    print(f"{cli.PROGRAM}: {text}", file=sys.stderr, flush=True)


def prepare(arguments: list[str]) -> list[str]:
    """The arguments, with data.path where it follows from a mount.

    Raises UserError naming the mount that is missing. Other mistakes are left to the command line.
    """
    command, rest = "run", arguments
    if arguments and not arguments[0].startswith("-"):
        command, rest = arguments[0], arguments[1:]
    if command in ("reconstruct", "export"):
        check_run_directory(rest)
        return arguments
    if command not in ("run", "config") or "-h" in rest or "--help" in rest or "--version" in rest:
        return arguments
    source, overrides = configuration(rest)
    if source is None:
        return arguments
    check_source(source)
    try:
        config = load_config(source, overrides)
    except UserError:
        return arguments
    data = mounted_data(config)
    if command == "run" and "--dry-run" not in rest:
        check_memory()
        check_places(config)
    return arguments if data is None else [*arguments, "--set", f"data.path={data}"]


def configuration(rest: list[str]) -> tuple[str | None, list[str]]:
    """The configuration and the overrides among the arguments; (None, []) when they make no sense."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    try:
        options, others = parser.parse_known_args(rest)
    except argparse.ArgumentError:
        return None, []
    source = options.config
    if source is None and others[:1] in (["show"], ["check"]):
        source = next((other for other in others[1:] if not other.startswith("-")), None)
    return source, options.overrides


def check_source(source: str) -> None:
    """A configuration that is not there is most often one that was not mounted."""
    try:
        find_config(source)
    except UserError as error:
        name = Path(source).name
        hint = f"mount a file of your own: -v FOLDER:/config:ro, --config /config/{name}"
        raise UserError(f"{error}\n{hint}") from None


def mounted_data(config: RunConfig) -> Path | None:
    """What data.path is to be when the configuration leaves it open; None when it says it itself.

    Raises UserError when no data is mounted where it should be.
    """
    data = config.data
    if data.kind == "synthetic":
        return None
    for name, path in (("data.path", data.path), ("data.val_path", data.val_path)):
        if path is not None and not str(path).startswith(BUILTIN) and not os.path.lexists(path):
            place = DATA if path.is_relative_to(DATA) else path.parent if data.kind == "array" else path
            raise UserError(f"{name}: {path} is not in the container; mount it: -v FOLDER:{place}:ro")
    if data.path is not None:
        return None
    if not DATA.is_dir():
        raise UserError(f"data.path: no data is mounted; add -v FOLDER:{DATA}:ro to docker run")
    if data.kind == "images":
        return DATA
    arrays = sorted(DATA.glob("*.npy"))
    if len(arrays) != 1:
        found = f"{DATA} holds {len(arrays)} .npy files"
        raise UserError(f"data.path: {found}; choose one with --set data.path={DATA}/NAME.npy")
    return arrays[0]


def check_run_directory(rest: list[str]) -> None:
    """`reconstruct` and `export` read what an earlier container wrote."""
    places = [Path(argument).absolute() for argument in rest if not argument.startswith("-")]
    if places and not places[0].exists() and not volume(places[0]):
        raise UserError(f"{places[0]} is not in the container; mount the runs: -v runs:/runs")


def check_places(config: RunConfig) -> None:
    """Raises UserError when the run directory or the caches cannot be written; says when results are not
    kept.
    """
    directory = (config.run.dir or Path("runs") / config.run.name).expanduser().absolute()
    place = nearest(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            raise UserError(f"run.dir: {place} is read-only; add -v runs:/runs to docker run")
        raise UserError(
            f'run.dir: {place} cannot be written by uid {os.getuid()}; add --user "$(id -u):$(id -g)" '
            "or use a named volume, -v runs:/runs"
        )
    if not volume(directory):
        say(f"note: {directory} goes with this container; -v runs:/runs keeps it")
    problems = []
    for root in caches.cache_root(config.runtime.cache_dir, os.environ, os.getuid()):
        problem = caches.probe(root)
        if problem is None:
            break
        problems.append(f"{root} {problem}")
    else:
        raise UserError(f"compile cache: {', '.join(problems)}; add -v cache:/cache to docker run")
    if shared_memory() < LEAST_SHARED_MEMORY and len(hardware.find_gpus()) > 1:
        say(f"warning: {SHARED_MEMORY} is small for several GPUs; add --ipc=host or --shm-size=1g")


def shared_memory() -> int:
    """Bytes of /dev/shm; 0 without one."""
    if not SHARED_MEMORY.is_dir():
        return 0
    size = os.statvfs(SHARED_MEMORY)
    return size.f_frsize * size.f_blocks


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def volume(path: Path) -> bool:
    """True when the path lies on another file system than the container's own root."""
    return nearest(path).stat().st_dev != Path("/").stat().st_dev


def check_memory() -> None:
    """Raises UserError when the container's memory limit is too small for any run."""
    limit = memory_limit(CONTROL_GROUPS)
    if limit is not None and limit < LEAST_MEMORY:
        raise UserError(
            f"memory: this container may use {limit // MIB} MiB, and a run needs {LEAST_MEMORY // MIB} MiB "
            "or more; raise docker run --memory"
        )


def memory_limit(root: Path) -> int | None:
    """Bytes that the control group allows; None when there is no limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 says "no limit" with the largest number of pages.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def memory_kills(root: Path) -> int:
    """Processes of the control group that the kernel has ended for want of memory."""
    for name in ("memory.events", "memory/memory.oom_control"):
        try:
            lines = (root / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = dict(line.split() for line in lines if len(line.split()) == 2)
        return int(counts.get("oom_kill", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
