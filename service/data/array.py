"""Samples in one .npy file of shape [N, C, *input_size], memory-mapped: signals, pictures or clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.config.data_checks import check_array
from service.data.transforms import Normalise
from service.errors import UserError


def open_array(path: Path, sample_shape: tuple[int, ...], field: str = "data.path") -> NDArray[Any]:
    """Map the file and check it against the model. Nothing is unpickled.

    Args:
        sample_shape: [C, *input_size] of the model.

    Raises:
        UserError: missing, not a .npy file, damaged, or of another shape or dtype.
    """
    check_array(field, path, sample_shape)
    try:
        rows: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{field}: {path} cannot be mapped: {reason}; write it with numpy.save") from None
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
