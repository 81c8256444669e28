"""The order of samples: a bijection, the same everywhere, and without visible structure."""

from __future__ import annotations

import numpy as np
import pytest

from service.data import hashing


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 1000, 65_536, 100_003])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permute_is_a_bijection(size: int, key: int) -> None:
    result = hashing.permute(np.arange(size), size, np.uint64(key))
    assert np.array_equal(np.sort(result), np.arange(size))


def test_permute_of_a_part_equals_part_of_the_whole() -> None:
    whole = hashing.permute(np.arange(1000), 1000, np.uint64(5))
    some = np.array([999, 0, 17])
    assert np.array_equal(hashing.permute(some, 1000, np.uint64(5)), whole[some])


def test_permute_takes_a_key_for_each_position() -> None:
    keys = np.array([5, 6], dtype=np.uint64)
    both = hashing.permute(np.array([3, 3]), 1000, keys)
    for value, key in zip(both, keys, strict=True):
        assert value == hashing.permute(np.array([3]), 1000, key)[0]


def test_permutations_differ_and_are_spread_evenly() -> None:
    size = 20_000
    first = hashing.permute(np.arange(size), size, np.uint64(hashing.derive(0, 1)))
    second = hashing.permute(np.arange(size), size, np.uint64(hashing.derive(0, 2)))
    assert np.mean(first == second) < 0.001
    assert abs(np.corrcoef(np.arange(size), first)[0, 1]) < 0.03
    # Where the first tenth of the positions lands: 200 expected in each of ten bins, standard deviation 13.
    counts = np.histogram(first[: size // 10], bins=10, range=(0, size))[0]
    assert counts.min() > 140
    assert counts.max() < 260


def test_every_small_permutation_occurs_about_equally_often() -> None:
    keys = hashing.derive_many(0, np.arange(6000))
    images = np.stack([hashing.permute(np.full(6000, p), 3, keys) for p in range(3)])
    counts = np.unique(images, axis=1, return_counts=True)[1]
    assert len(counts) == 6
    assert counts.min() > 850


def test_numbers_never_change() -> None:
    """A changed hash would silently change every run that is resumed; computed once and written down."""
    assert hashing.mix_int(1) == 0x5692161D100B05E5
    assert hashing.derive(0, 1, 2) == 0xE90F7A0FCEFA6E84
    assert hashing.permute(np.arange(8), 8, np.uint64(7)).tolist() == [3, 6, 1, 4, 7, 2, 0, 5]


def test_scalar_and_array_forms_agree() -> None:
    parts = np.array([0, 1, 5, 2**62], dtype=np.int64)
    many = hashing.derive_many(hashing.derive(3, 4), parts)
    assert many.tolist() == [hashing.derive(3, 4, int(part)) for part in parts]


def test_draws_are_uniform_and_depend_on_the_key() -> None:
    draws = hashing.Draws(9)
    values = np.array([draws.uniform(2, 4) for _ in range(4000)])
    assert values.min() >= 2
    assert values.max() < 4
    assert abs(values.mean() - 3) < 0.05
    assert hashing.Draws(9).uniform() != hashing.Draws(10).uniform()
