"""Files that are whole or not there: written beside their name and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process takes.

    Random, since a process id is not unique where nodes share a file system: in containers it is often the same.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it becomes `path` at the end, or is removed after an error.

    What has to survive a crash is fsynced by the writer. Raises OSError where it cannot be renamed.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
