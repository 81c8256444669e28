"""Samples in one .npy file of shape [N, C, *input_size], memory-mapped: signals, pictures or clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.config.data_checks import ARRAY_DTYPES
from service.data.transforms import Normalise
from service.errors import UserError


def open_array(path: Path, sample_shape: tuple[int, ...], field: str = "data.path") -> NDArray[Any]:
    """Map the file and check it against the model. Nothing is unpickled.

    Args:
        sample_shape: [C, *input_size] of the model.

    Raises:
        UserError: missing, not a .npy file, damaged, or of another shape or dtype.
    """
    if not path.exists():
        raise UserError(f"{field}: {path} does not exist")
    if path.is_dir():
        raise UserError(f"{field}: {path} is a folder; data.kind=array needs one .npy file")
    if not path.is_file():
        raise UserError(f"{field}: {path} is not a regular file; data.kind=array needs one .npy file")
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
        rows: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except PermissionError as error:
        raise UserError(f"{field}: cannot read {path}: {error.strerror}") from None
    except (ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{field}: {path} is not a whole .npy file of numbers ({reason}); write it with numpy.save"
        ) from None
    if rows.dtype.newbyteorder("=").name not in ARRAY_DTYPES.values():
        raise UserError(f"{field}: {path} holds {rows.dtype}; convert it to one of {', '.join(ARRAY_DTYPES.values())}")
    if rows.shape[1:] != sample_shape:
        expected = ", ".join(map(str, ("N", *sample_shape)))
        raise UserError(
            f"{field}: {path} has shape {list(rows.shape)}, "
            f"but model.in_chans and model.input_size ask for [{expected}]"
        )
    if len(rows) == 0:
        raise UserError(f"{field}: {path} holds no samples (its first dimension is 0)")
    return rows


def normalise_for(rows: NDArray[Any], in_chans: int, mean: Any, std: Any) -> Normalise:
    """uint8 is taken as 0..255 and scaled to 0..1 first; every other dtype is taken as it is."""
    return Normalise(in_chans, mean, std, full_scale=255.0 if rows.dtype == np.uint8 else 1.0)


class ArraySource:
    """Chosen rows of a mapped array; no augmentation.

    Args:
        path: the file, which names samples.
        rows: [N, C, *input_size].
        chosen: int64 [n] row numbers, or None for all rows.
    """

    bad_files = 0

    def __init__(
        self, path: Path, rows: NDArray[Any], normalise: Normalise, chosen: NDArray[np.int64] | None = None
    ) -> None:
        self._path, self._rows, self._normalise, self._chosen = path, rows, normalise, chosen

    def __len__(self) -> int:
        return len(self._rows if self._chosen is None else self._chosen)

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        """See `Source.read`; the key is ignored."""
        return self._normalise(self._rows[self._row(index)])

    def name(self, index: int) -> str:
        """See `Source.name`; rows are counted from 0, as numpy indexes them."""
        return f"row {self._row(index)} of {self._path}"

    def _row(self, index: int) -> int:
        return index if self._chosen is None else int(self._chosen[index])
