"""Counter-based integer hashing: sample order, crops and flips as pure functions of (seed, sample number).

Everything here is 64-bit integer arithmetic, so it gives the same numbers on every platform, rank and
version of numpy, needs no generator state, and costs the same at sample 0 and at sample 10**12.
The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 8

# Streams of the same seed that must not be correlated with one another.
ORDER, AUGMENT, REPLACE, VALIDATION, SYNTHETIC = range(1, 6)


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble an array of 64-bit integers (a bijection); wraps around modulo 2**64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def mix_int(value: int) -> int:
    """`mix` of one Python integer, taken modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = 0
    for part in parts:
        key = mix_int(key + _GOLDEN + mix_int(part + _GOLDEN))
    return key


def derive_many(key: int, parts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`derive(..., part)` for an array of last parts, where `key` is `derive` of the parts before."""
    golden = np.uint64(_GOLDEN)
    inner = mix(parts.astype(np.uint64) + golden)
    return mix(inner + np.uint64((key + _GOLDEN) & _MASK))


def text_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone; used to split files into train and validation."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def uniform_floats(key: int, counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one a counter."""
    return (derive_many(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """A sequence of uniform numbers that depends on its key alone."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._count = 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number of the sequence, in [low, high)."""
        self._count += 1
        return low + (high - low) * ((mix_int(self._key + self._count * _GOLDEN) >> 11) * 2.0**-53)


def permute(positions: NDArray[np.int64], size: int, keys: NDArray[np.uint64] | np.uint64) -> NDArray[np.int64]:
    """Where each position in [0, size) goes under the pseudo-random permutation that its key names.

    A Feistel network over the next power of two, walked along its cycle until it lands inside [0, size):
    a bijection for each key, without a table of `size` entries.

    Args:
        positions: int64 [n].
        size: number of elements that are permuted, at least 1.
        keys: uint64 [n], or one for all.
    """
    # Fewer than 2**4 points would leave halves of one bit, which mix poorly.
    bits = max(4, (size - 1).bit_length())
    keys = np.broadcast_to(np.asarray(keys, dtype=np.uint64), positions.shape)
    result = positions.astype(np.uint64)
    walking = np.arange(len(positions))
    while len(walking):
        result[walking] = _feistel(result[walking], bits, keys[walking])
        walking = walking[result[walking] >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(value: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = value >> low_bits, value & low_mask
    for number in range(_FEISTEL_ROUNDS):
        round_keys = keys + np.uint64((number * _GOLDEN) & _MASK)
        if number % 2:
            high = high ^ (mix(mix(low + round_keys)) & high_mask)
        else:
            low = low ^ (mix(mix(high + round_keys)) & low_mask)
    return (high << low_bits) | low
