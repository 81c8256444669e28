"""What a data source is, and how it is split into training and validation data."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Source(Protocol):
    """A finite, indexable set of samples. `read` may be called from several threads at once."""

    @property
    def bad_files(self) -> int:
        """Files found unreadable so far, each counted once."""
        ...

    def __len__(self) -> int:
        """Samples in an epoch, at least 1."""
        ...

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        """Sample `index` in [0, len), normalised, as float32 [C, *input_size].

        Args:
            index: which sample.
            key: 64-bit integer from which all randomness of augmentation is drawn; sources without
                augmentation ignore it. The same index and key give the same array.
        """
        ...

    def name(self, index: int) -> str:
        """Where sample `index` comes from, for people: its file, and the row in it."""
        ...


def held_out(fractions: NDArray[np.float64], val_fraction: float) -> NDArray[np.bool_]:
    """Which items are validation data, given one fixed pseudo-random number in [0, 1) an item.

    An item's side does not change when others are added, except that at least one item is kept on each side.

    Args:
        fractions: float64 [N], N at least 2.
        val_fraction: the share that is held out.
    """
    chosen: NDArray[np.bool_] = fractions < val_fraction
    if not chosen.any():
        chosen[int(np.argmin(fractions))] = True
    if chosen.all():
        chosen[int(np.argmax(fractions))] = False
    return chosen
