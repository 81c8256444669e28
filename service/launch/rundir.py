"""The run directory: made, locked for one live run, and bound to the configuration it began with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from service.config.load import dump_config, load_config
from service.config.resume import describe_changes
from service.config.schema import RunConfig
from service.errors import UserError
from service.files import replacing, temporary_name

CONFIG_NAME = "run.yaml"


def make_run_directory(path: Path) -> None:
    """Make the directory and its state folder. Raises UserError when it cannot be made or written."""
    try:
        (path / "state").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be written ({error.strerror}); choose another directory") from None


def private_directory(path: Path, node_rank: int) -> Path:
    """Directory on this node, for this user only, for the sockets and markers of one launch of a run.

    Its name comes from the run directory, whose lock is held, so that what a killed launcher left is used
    again instead of adding up under /tmp. A directory of that name that is not ours is left alone.
    """
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    base = tempfile.gettempdir()
    # The path of a socket holds 107 bytes; a long TMPDIR (a scheduler's, a test's) does not fit.
    if len(base) > 60 and os.access("/tmp", os.W_OK):
        base = "/tmp"
    directory = Path(base) / f"hiera-{os.getuid()}-{digest}-{node_rank}"
    try:
        status = directory.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        pass
    try:
        directory.mkdir(mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hiera-", dir=base))
    return directory


def lock_name(kind: str, nnodes: int, node_rank: int) -> str:
    """Name of a lock file; several nodes share the directory, and each has its own."""
    return f".{kind}" if nnodes == 1 else f".{kind}.{node_rank}"


@contextlib.contextmanager
def locked(path: Path, nnodes: int, node_rank: int, workers_timeout: float = 30.0) -> Iterator[None]:
    """Hold the run directory for this launcher, and wait until no worker of an earlier launch is left.

    The kernel drops the locks with the processes, however they end. The launcher's lock falls a moment
    before its workers are dead, so those hold a shared lock of their own (`hold_worker_lock`). Raises
    UserError.
    """
    lock = path / lock_name("lock", nnodes, node_rank)
    with _open(lock) as file:
        if not _flock(file, fcntl.LOCK_EX):
            holder = lock.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
            raise UserError(f"run.dir: {path} is in use by another live run ({holder}); stop it first")
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        with _open(path / lock_name("workers", nnodes, node_rank)) as workers:
            deadline = time.monotonic() + workers_timeout
            while not _flock(workers, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise UserError(f"run.dir: workers of an earlier run still use {path}; wait for them or kill them")
                time.sleep(0.1)
        yield


def hold_worker_lock(path: Path, nnodes: int, node_rank: int) -> int | None:
    """Worker side: hold the shared lock until this process ends; None where it cannot be had (never an
    error).
    """
    try:
        file = os.open(path / lock_name("workers", nnodes, node_rank), os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return file


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be opened ({error.strerror})") from None
    try:
        yield file
    finally:
        os.close(file)


def _flock(file: int, kind: int) -> bool:
    """True when the lock was taken; a file system without locks counts as taken."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def bind_config(path: Path, config: RunConfig) -> bool:
    """Write run.yaml on the first start; later compare. Returns True on the first start.

    Raises UserError naming the fields that differ and matter, unless checkpoint.allow_changes. Fields
    that may change freely (or all, with allow_changes) replace those of run.yaml, which the workers read.
    """
    file = path / CONFIG_NAME
    text = dump_config(config)
    if not file.exists() and _write_new(file, text):
        return True
    # Checked again: another node of this launch may have written it a moment ago.
    try:
        before = load_config(file)
    except UserError as error:
        if config.checkpoint.allow_changes:
            _replace(file, text)
            return False
        raise UserError(
            f"{file} does not describe a run ({error}); use a new run.dir or checkpoint.allow_changes=true"
        ) from None
    changed = describe_changes(before, config)
    if changed and not config.checkpoint.allow_changes:
        raise UserError(
            f"run.dir: {path} holds a run with other settings: {'; '.join(changed)}\n"
            "use a new run.dir, or set checkpoint.allow_changes=true to go on with them"
        )
    if dump_config(before) != text:
        _replace(file, text)
    return False


def _write_new(file: Path, text: str) -> bool:
    """Write a file that does not exist yet, whole or not at all; False when another process was first."""
    temporary = temporary_name(file)
    try:
        _write(temporary, text)
        try:
            os.link(temporary, file)
        except FileExistsError:
            return False
        except OSError:
            # A file system without hard links.
            temporary.replace(file)
        return True
    except OSError as error:
        raise _unwritable(file, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _replace(file: Path, text: str) -> None:
    try:
        with replacing(file) as temporary:
            _write(temporary, text)
    except OSError as error:
        raise _unwritable(file, error) from None


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _unwritable(file: Path, error: OSError) -> UserError:
    return UserError(f"run.dir: {file} cannot be written ({error.strerror})")
