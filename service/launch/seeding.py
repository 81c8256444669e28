"""A filled compile cache as one file that many nodes unpack, instead of each compiling the same.

`runtime.cache_seed` names a directory that all nodes see. The first run that finishes packs node 0's cache
there, as KEY.tar.gz with the key of service.launch.caches: versions of torch, Triton and CUDA, GPU,
architecture. A node unpacks the file of its own key before its workers start. What does not fit is passed
over with one line, and the node compiles: a seed saves time and decides nothing.

What is unpacked is executed, so a seed is trusted like the virtual environment: whoever may write there runs
code in the jobs that name it. A damaged file, or one made to write elsewhere, is still refused whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

FOLDERS = ("inductor", "triton")
"""What of a cache is packed: results of compilers, without CUDA's own cache and downloads."""
HEAD = "hiera-train-cache.json"
"""First member of a seed: {"key": KEY}."""
MARK = ".seed"
"""File of a cache that says which seed is in it already."""
MAX_BYTES = 16 << 30
"""Unpacked size beyond which a seed is damaged rather than large."""
STALE_SECONDS = 3600.0


class SeedError(Exception):
    """A seed that is not unpacked; the message is a few words."""


def seed_file(seeds: Path, cache: Path) -> Path:
    """File of a cache, whose directory has the key as its name, below `seeds`."""
    return seeds / f"{cache.name}.tar.gz"


def pack(seeds: Path, cache: Path) -> str | None:
    """Write the seed of a cache unless there is one; whole or not at all.

    Returns a line for the user, None when there is nothing to do. Never raises for what a disk refuses.
    """
    file = seed_file(seeds, cache)
    members = list(_packed(cache))
    if file.exists() or not members:
        return None
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        seeds.mkdir(parents=True, exist_ok=True)
        with tarfile.open(temporary, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive:
            _add_head(archive, cache.name)
            for path in members:
                archive.add(path, str(path.relative_to(cache)), recursive=False)
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return f"warning: runtime.cache_seed: {file} cannot be written ({error.strerror})"
    return f"cache seed: {len(members)} files packed into {file}"


def _packed(cache: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for directory, names, files in os.walk(cache / folder):
            # What a compiler has not finished, and its locks.
            names[:] = sorted(name for name in names if not name.startswith((".", "tmp.", "locks")))
            for name in sorted(files):
                path = Path(directory, name)
                if not name.startswith(".") and not name.endswith((".lock", ".tmp")) and path.is_file():
                    yield path


def _add_head(archive: tarfile.TarFile, key: str) -> None:
    with tempfile.TemporaryFile() as head:
        head.write(json.dumps({"key": key}).encode())
        member = tarfile.TarInfo(HEAD)
        member.size = head.tell()
        head.seek(0)
        archive.addfile(member, head)


def unpack(seeds: Path, cache: Path) -> str | None:
    """Fill a cache from its seed, if there is one that is not in it already.

    Files that the cache has stay. Returns a line for the user, None when there was nothing to do. Never raises
    for a seed that does not fit or a disk that refuses; then the cache is as it was.
    """
    file = seed_file(seeds, cache)
    staging: Path | None = None
    try:
        found = file.stat()
        identity = f"{found.st_size} {found.st_mtime_ns}\n"
        mark = cache / MARK
        if mark.is_file() and mark.read_text(encoding="ascii", errors="replace") == identity:
            return None
        _remove_stale(cache)
        # Below the cache: on its file system, where a rename is atomic.
        staging = Path(tempfile.mkdtemp(prefix=".seed-", dir=cache))
        with file.open("rb") as stream:
            count = _extract(stream, staging, cache)
        _merge(staging, cache)
        mark.write_text(identity, encoding="ascii")
    except FileNotFoundError:
        return None
    except SeedError as error:
        return f"cache seed: {file} is ignored: {error}"
    except OSError as error:
        return f"cache seed: {file} is ignored: {error.strerror or error}"
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return f"cache seed: {count} files from {file}"


def _extract(stream: IO[bytes], staging: Path, cache: Path) -> int:
    """Unpack into `staging` what will be in `cache`; returns the number of files. Raises SeedError."""
    count = size = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|gz") as archive:
            head = archive.next()
            if head is None or head.name != HEAD or head.size > 4096:
                raise SeedError("it is not a seed of hiera-train")
            content = archive.extractfile(head)
            key = json.loads(content.read())["key"] if content is not None else None
            if key != cache.name:
                raise SeedError(f"it is of {key}")
            while (member := archive.next()) is not None:
                path = PurePosixPath(member.name)
                if not member.isreg() or ".." in path.parts or len(path.parts) < 2 or path.parts[0] not in FOLDERS:
                    raise SeedError(f"it holds {member.name!r}, which is no file of a cache")
                size += member.size
                if size > MAX_BYTES:
                    raise SeedError(f"it unpacks to more than {MAX_BYTES >> 30} GiB")
                content = archive.extractfile(member)
                assert content is not None
                _write(staging / path, content, executable=bool(member.mode & 0o100))
                if path.name.startswith("__grp__"):
                    _relocate(staging / path, cache / path.parent)
                count += 1
    except (tarfile.TarError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise SeedError(f"it is damaged ({type(error).__name__})") from None
    return count


def _write(path: Path, content: IO[bytes], *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    path.chmod(0o700 if executable else 0o600)


def _relocate(group: Path, directory: Path) -> None:
    """Triton's list of the files of a kernel names them by where they were compiled."""
    listed = json.loads(group.read_text(encoding="utf-8"))
    listed["child_paths"] = {
        name: str(directory / PurePosixPath(path).name) for name, path in listed["child_paths"].items()
    }
    group.write_text(json.dumps(listed), encoding="utf-8")


def _merge(source: Path, target: Path) -> None:
    """Move what `target` lacks, as whole directories where it can be: a kernel is there with all its files."""
    for path in sorted(source.iterdir()):
        place = target / path.name
        if not place.exists():
            try:
                path.rename(place)
                continue
            except OSError:
                # Another job of this node was first.
                if not place.exists():
                    raise
        if path.is_dir() and place.is_dir():
            _merge(path, place)


def _remove_stale(cache: Path) -> None:
    """Remove what a killed launcher has left."""
    for path in cache.glob(".seed-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
