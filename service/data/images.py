"""Pictures in a folder: listing, split by file, decoding, and what happens to files that cannot be read."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.config.data_checks import check_folder
from service.data import hashing
from service.data.source import held_out
from service.data.transforms import (
    Normalise,
    View,
    centre_view,
    describe_failure,
    random_view,
    render,
    shrink_on_decode,
    upright,
    upright_size,
)
from service.errors import TrainingError, UserError

EXTENSIONS = frozenset(
    (
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".webp",
        ".bmp",
        ".dib",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
    )
    + (".pbm", ".pnm", ".jp2", ".j2k", ".tga", ".avif")
)

log = logging.getLogger(__name__)


class BadFiles:
    """The files that could not be read: each is counted and named once, and there is a limit.

    Shared by the training and the validation source of a rank; safe to use from several threads.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, path: Path, error: BaseException) -> None:
        """Note that a file is bad.

        Raises:
            TrainingError: more files are bad than data.max_bad_files allows.
        """
        with self._lock:
            if name not in self._names:
                self._names.add(name)
                log.warning("skipping unreadable picture %s", describe_failure(path, error))
            if len(self._names) > self._limit:
                raise TrainingError(
                    f"more than {self._limit} pictures cannot be read (data.max_bad_files), the last one "
                    f"{describe_failure(path, error)}\nrepair or remove them, or raise data.max_bad_files"
                )


def list_pictures(root: Path, field: str = "data.path") -> list[str]:
    """Paths, relative to root, of all pictures below it, in an order that depends on the names alone.

    Names that begin with a dot are ignored. Links to folders are followed; a folder reached twice is listed
    once.

    Raises:
        UserError: root or a folder below it is missing or cannot be listed, or there is no picture.
    """
    check_folder(field, root)
    found: list[str] = []
    seen = {_identity(root)}

    def refuse(error: OSError) -> NoReturn:
        raise UserError(
            f"{field}: cannot list {error.filename}: {error.strerror}; make it readable for this user or move it away"
        )

    for folder, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        kept = []
        for name in sorted(folders):
            try:
                identity = _identity(os.path.join(folder, name))
            except OSError as error:
                refuse(error)
            if not name.startswith(".") and identity not in seen:
                seen.add(identity)
                kept.append(name)
        folders[:] = kept
        relative = os.path.relpath(folder, root)
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS:
                found.append(name if relative == "." else f"{relative}/{name}")
    if not found:
        raise UserError(f"{field}: no pictures in {root} at any depth; known are {' '.join(sorted(EXTENSIONS))}")
    return sorted(found)


def split_by_name(names: Sequence[str], val_fraction: float, root: Path) -> tuple[list[str], list[str]]:
    """Training and validation files, by a hash of each relative path.

    Raises:
        UserError: there is only one file.
    """
    if len(names) < 2:
        raise UserError(
            f"data.path: only one picture in {root}, and one is held out for validation; add some or set data.val_path"
        )
    chosen = held_out(np.array([hashing.text_fraction(name) for name in names]), val_fraction)
    train = [name for name, is_val in zip(names, chosen, strict=True) if not is_val]
    return train, [name for name, is_val in zip(names, chosen, strict=True) if is_val]


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


class ImageSource:
    """Pictures of a folder as samples.

    Training data is cropped and mirrored at random, validation data is cropped centrally.

    A file that cannot be decoded is replaced by another of the same source, chosen by a hash of its index,
    so that every rank and every resumed run replaces it by the same one.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        size: tuple[int, int],
        normalise: Normalise,
        bad: BadFiles,
        *,
        in_chans: int,
        train: bool,
        scale: tuple[float, float],
        flip: bool,
    ) -> None:
        self._root, self._names, self._size = root, names, size
        self._normalise, self._bad = normalise, bad
        self._in_chans, self._train, self._scale, self._flip = in_chans, train, scale, flip

    @property
    def bad_files(self) -> int:
        return len(self._bad)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        """See `Source.read`.

        Raises:
            TrainingError: too many files, or all, cannot be read.
        """
        for candidate in self._candidates(index):
            name = self._names[candidate]
            if name in self._bad:
                continue
            path = self._root / name
            try:
                if not stat.S_ISREG(path.stat().st_mode):
                    # To open a named pipe would wait for its writer.
                    raise OSError("not a regular file")
                pixels = self._decode(path, key)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - Pillow's decoders raise whatever a damaged file leads them to
                self._bad.add(name, path, error)
                continue
            return self._normalise(pixels.transpose(2, 0, 1))
        raise TrainingError(f"none of the {len(self)} pictures in {self._root} can be read")

    def name(self, index: int) -> str:
        """See `Source.name`; of an unreadable file, the one that is read in its place."""
        names = (self._names[candidate] for candidate in self._candidates(index))
        return str(self._root / next((name for name in names if name not in self._bad), self._names[index]))

    def _candidates(self, index: int) -> Iterator[int]:
        yield index
        key = np.uint64(hashing.derive(hashing.REPLACE, index))
        for position in range(len(self)):
            yield int(hashing.permute(np.array([position]), len(self), key)[0])

    def _decode(self, path: Path, key: int) -> NDArray[np.uint8]:
        with Image.open(path) as picture:
            width, height = upright_size(picture)
            if self._train:
                view = random_view(width, height, self._size, key, scale=self._scale, flip=self._flip)
            else:
                view = centre_view(width, height, self._size)
            shrink_on_decode(picture, view, self._size)
            decoded = upright(picture, self._in_chans)
        factor_x, factor_y = decoded.width / width, decoded.height / height
        left, upper, right, lower = view.box
        box = (left * factor_x, upper * factor_y, right * factor_x, lower * factor_y)
        return render(decoded, View(box, view.flip), self._size)
