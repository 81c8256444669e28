"""Batched column sums against the sums one by one, and their guards."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.ops.batched_sums import batched_sums
from hiera_optim.ops.column_sum import column_sum, sum_partials


def test_equals_single_sums() -> None:
    xs = [torch.randn(300, 40), torch.randn(7, 513), torch.randn(1, 1)]
    want = [x.sum(0) for x in xs]
    for _ in range(3):  # the first pass learns, the others batch
        with batched_sums("test_equals_single_sums", torch.device("cpu")):
            got = [column_sum(x) for x in xs]
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_foreign_partials_are_refused() -> None:
    partials = torch.randn(5, 8)
    with batched_sums("test_foreign_partials", torch.device("cpu")):
        sum_partials(partials)
    with (
        pytest.raises(AssertionError, match="new_partials"),
        batched_sums("test_foreign_partials", torch.device("cpu")),
    ):
        sum_partials(partials)


def test_another_sequence_under_one_key_is_refused() -> None:
    with batched_sums("test_another_sequence", torch.device("cpu")):
        column_sum(torch.randn(5, 8))
    with (
        pytest.raises(AssertionError, match="where"),
        batched_sums("test_another_sequence", torch.device("cpu")),
    ):
        column_sum(torch.randn(5, 9))
