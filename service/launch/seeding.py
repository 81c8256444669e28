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
import gzip
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from service.files import replacing

FOLDERS = ("inductor", "triton")
"""What of a cache is packed: results of compilers, without CUDA's own cache and downloads."""
HEAD = "hiera-train-cache.json"
"""First member of a seed: {"key": KEY, "files": how many follow}."""
MARK = ".seed"
"""File of a cache that says which seed is in it already."""
MAX_BYTES = 16 << 30
"""Unpacked size beyond which a seed is damaged rather than large."""
MAX_GROUP_BYTES = 4 << 20
"""Size beyond which a list of a kernel's files, which is read whole, is none."""
MAX_DEPTH = 32
STALE_SECONDS = 3600.0
STALE_SEED_SECONDS = 24 * 3600.0
"""A pack may be under way on another node, whose clock may be off."""


class SeedError(Exception):
    """A seed that is not unpacked; the message is a few words."""


def seed_file(seeds: Path, cache: Path) -> Path:
    """File of a cache, whose directory has the key as its name, below `seeds`."""
    return seeds / f"{cache.name}.tar.gz"


def pack(seeds: Path, cache: Path, stopped: Callable[[], bool] = lambda: False) -> str | None:
    """Write the seed of a cache unless there is one; whole or not at all.

    `stopped` is asked before each file; once it is true, packing ends without a seed. Returns a line for the
    user, None when there is nothing to do. Never raises for what a disk refuses.
    """
    file = seed_file(seeds, cache)
    try:
        members = [] if file.exists() else list(_packed(cache))
        if not members:
            return None
        seeds.mkdir(parents=True, exist_ok=True)
        _remove_stale(seeds.glob(".*.tar.gz.*"), STALE_SEED_SECONDS)
        with (
            replacing(file) as temporary,
            tarfile.open(temporary, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive,
        ):
            _add_head(archive, cache.name, len(members))
            for path in members:
                if stopped():
                    raise SeedError("a stop was asked for; a later run packs it")
                archive.add(path, str(path.relative_to(cache)), recursive=False)
    except SeedError as error:
        return f"cache seed: {file} is not written: {error}"
    except OSError as error:
        return f"warning: runtime.cache_seed: {file} cannot be written ({error.strerror or error})"
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


def _add_head(archive: tarfile.TarFile, key: str, files: int) -> None:
    with tempfile.TemporaryFile() as head:
        head.write(json.dumps({"key": key, "files": files}).encode())
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
        try:
            found = file.stat()
        except FileNotFoundError:
            return None
        identity = f"{found.st_size} {found.st_mtime_ns}\n"
        mark = cache / MARK
        if mark.is_file() and mark.read_text(encoding="ascii", errors="replace") == identity:
            return None
        _remove_stale(cache.glob(".seed-*"), STALE_SECONDS)
        # Below the cache: on its file system, where a rename is atomic.
        staging = Path(tempfile.mkdtemp(prefix=".seed-", dir=cache))
        with file.open("rb") as stream:
            count = _extract(stream, staging, cache)
        _merge(staging, cache)
        mark.write_text(identity, encoding="ascii")
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
    try:
        # Not tarfile's own "r|gz", which checks no CRC.
        with gzip.GzipFile(fileobj=stream) as plain:
            with tarfile.open(fileobj=plain, mode="r|") as archive:
                files = _read_head(archive, cache.name)
                count = _extract_files(archive, staging, cache)
            # tarfile takes a damaged header for the end. The CRC is read and checked at the true one.
            if len(plain.read(tarfile.RECORDSIZE + 1)) > tarfile.RECORDSIZE:
                raise SeedError("it is damaged (more follows its last file)")
    except (
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise SeedError(f"it is damaged ({type(error).__name__})") from None
    if count != files:
        raise SeedError(f"it is damaged ({count} of {files} files)")
    return count


def _read_head(archive: tarfile.TarFile, key: str) -> int:
    """Number of files that follow, in a seed of this key."""
    head = archive.next()
    content = archive.extractfile(head) if head is not None and head.isreg() else None
    if head is None or content is None or head.name != HEAD or head.size > 4096:
        raise SeedError("it is not a seed of hiera-train")
    described = json.loads(content.read())
    if described["key"] != key:
        raise SeedError(f"it is of {described['key']!r}")
    files = described["files"]
    if not isinstance(files, int):
        raise TypeError("files is no number")
    return files


def _extract_files(archive: tarfile.TarFile, staging: Path, cache: Path) -> int:
    count = size = 0
    while (member := archive.next()) is not None:
        path = PurePosixPath(member.name)
        inside = ".." not in path.parts and 2 <= len(path.parts) <= MAX_DEPTH and path.parts[0] in FOLDERS
        is_group = path.name.startswith("__grp__")
        if not member.isreg() or not inside or (is_group and member.size > MAX_GROUP_BYTES):
            raise SeedError(f"it holds {member.name!r}, which is no file of a cache")
        size += member.size
        if size > MAX_BYTES:
            raise SeedError(f"it unpacks to more than {MAX_BYTES >> 30} GiB")
        content = archive.extractfile(member)
        assert content is not None
        _write(staging / path, content, executable=bool(member.mode & 0o100))
        if is_group:
            _relocate(staging / path, cache / path.parent)
        count += 1
    return count


def _write(path: Path, content: IO[bytes], *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    path.chmod(0o700 if executable else 0o600)


def _relocate(group: Path, directory: Path) -> None:
    """Triton's list of the files of a kernel names them by where they were compiled."""
    listed = json.loads(group.read_text(encoding="utf-8"))
    paths = listed["child_paths"]
    if not isinstance(paths, dict):
        raise TypeError("child_paths is no mapping")
    listed["child_paths"] = {name: str(directory / PurePosixPath(path).name) for name, path in paths.items()}
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


def _remove_stale(left: Iterable[Path], seconds: float) -> None:
    """Remove what a killed launcher has left, unless it is younger than `seconds`; another may be doing the same."""
    for path in left:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > seconds:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
