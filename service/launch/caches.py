"""Persistent compile caches: where they are, under which key, and whether they can be used at all.

Inductor and Triton write compiled code there and map it executable, so a directory that is full,
read-only or mounted noexec fails late, in a traceback of a compiler; it is probed here instead.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from service.errors import UserError


def cache_key(torch: str, triton: str, cuda: str, gpu: str, arch: str) -> str:
    """Directory name for one combination of versions and hardware; only letters, digits, dot, plus,
    minus, underscore.

    Compiled code of one combination is wrong or useless in another, and a shared home often serves several.
    """
    parts = (f"torch-{torch}", f"triton-{triton}", f"cuda-{cuda}", gpu, arch)
    return "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part).strip("-") or "none" for part in parts)


def cache_root(configured: Path | None, environment: Mapping[str, str], uid: int) -> list[Path]:
    """Directories to try, best first. A configured one stands alone: when it cannot be used, that is an
    error.
    """
    if configured is not None:
        return [configured]
    candidates = []
    if environment.get("XDG_CACHE_HOME"):
        candidates.append(Path(environment["XDG_CACHE_HOME"]) / "hiera-train")
    elif environment.get("HOME"):
        candidates.append(Path(environment["HOME"]) / ".cache" / "hiera-train")
    # The uid in the name: /tmp is shared, and another user's directory cannot be written.
    candidates.append(Path(tempfile.gettempdir()) / f"hiera-train-cache-{uid}")
    return candidates


def probe(directory: Path) -> str | None:
    """Make `directory`, write a file in it and execute it; None when that works, else what does not, in a
    few words.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What lies there is executed later: below /tmp, somebody else may have made the directory first.
        owner = directory.stat().st_uid
    except OSError as error:
        return f"cannot be made ({os.strerror(error.errno or 0)})"
    if owner not in (os.getuid(), 0):
        return f"belongs to another user (uid {owner})"
    script: str | None = None
    try:
        handle, script = tempfile.mkstemp(prefix=".probe-", suffix=".sh", dir=directory)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write("#!/bin/sh\nexit 0\n")
        os.chmod(script, 0o700)
        subprocess.run([script], check=True, timeout=30, stdin=subprocess.DEVNULL, capture_output=True)
    except PermissionError as error:
        if script is None:
            return f"cannot be written ({os.strerror(error.errno or 0)})"
        return "cannot execute files (is it mounted noexec?)"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOEXEC) and script is not None:
            # No /bin/sh in the image says nothing about the directory.
            return None
        return f"cannot be written ({os.strerror(error.errno or 0)})"
    except subprocess.SubprocessError as error:
        return f"cannot execute files ({error})"
    finally:
        if script is not None:
            Path(script).unlink(missing_ok=True)
    return None


def prepare_cache(
    configured: Path | None, key: str, environment: Mapping[str, str], uid: int
) -> tuple[Path, list[str]]:
    """Directory for this key, made and probed, and notes about candidates passed over.

    Raises UserError when the configured directory, or the last candidate, cannot be written or executed.
    """
    notes: list[str] = []
    problem = ""
    for root in cache_root(configured, environment, uid):
        trouble = probe(root / key)
        if trouble is None:
            return root / key, notes
        problem = f"{root} {trouble}"
        notes.append(f"compile cache: {problem}")
    field = "runtime.cache_dir" if configured is not None else "compile cache"
    raise UserError(f"{field}: {problem}; set runtime.cache_dir to a local directory that can execute files")


def count_entries(directory: Path) -> int:
    """Compiled artefacts in a cache directory: files of any depth. 0 when it cannot be read."""
    total = 0
    for _, _, files in os.walk(directory):
        total += len(files)
    return total
