"""Made-up samples for measuring speed: waves and noise, the same on every rank, nearly free to read."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from service.data import hashing

_POOL_BYTES = 64 << 20
_WAVES = 3


class SyntheticSource:
    """`length` samples that repeat a small pool made once, so that reading costs one copy.

    Each sample is a sum of plane waves, which a model can learn, and of noise, which it cannot; mean about 0,
    variance about 1.
    """

    bad_files = 0

    def __init__(self, length: int, sample_shape: tuple[int, ...], seed: int) -> None:
        count = max(4, min(64, _POOL_BYTES // (4 * math.prod(sample_shape))))
        self._length = length
        self._pool = np.stack([_sample(sample_shape, hashing.derive(hashing.SYNTHETIC, seed, i)) for i in range(count)])

    def __len__(self) -> int:
        return self._length

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        """See `Source.read`; the key is ignored. The array is shared: do not write to it."""
        return self._pool[index % len(self._pool)]  # type: ignore[no-any-return]

    def name(self, index: int) -> str:
        """See `Source.name`."""
        return f"made-up sample {index}"


def _sample(shape: tuple[int, ...], key: int) -> NDArray[np.float32]:
    chans, *size = shape
    draws = hashing.Draws(key)
    noise = hashing.uniform_floats(key, np.arange(math.prod(shape), dtype=np.int64)).reshape(shape)
    sample = (noise - 0.5) * math.sqrt(12 * 0.1)
    for _ in range(_WAVES):
        # One to six periods across the sample in each dimension; a phase a channel.
        phase = np.zeros(size)
        for axis, length in enumerate(size):
            ramp = np.arange(length) / length * draws.uniform(1, 6)
            phase = phase + ramp.reshape([-1 if d == axis else 1 for d in range(len(size))])
        shifts = np.array([draws.uniform() for _ in range(chans)]).reshape(-1, *[1] * len(size))
        sample += math.sqrt(2 * 0.9 / _WAVES) * np.sin(2 * math.pi * (phase + shifts))
    return sample.astype(np.float32)
