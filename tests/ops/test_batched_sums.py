"""Batched column sums against the sums one by one, and their guards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from hiera_optim.ops.batched_sums import Batch, Segment, batched_sums, new_partials, take_sum
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


def test_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs the backward of each GPU in a thread of its own. No kernel: the interpreter knows one thread."""
    meeting = Barrier(2, timeout=60)
    monkeypatch.setattr(Batch, "launch", lambda self: None)

    def work(columns: int) -> tuple[Tensor, Tensor]:
        def ask() -> tuple[Tensor, Tensor | None]:
            partials = new_partials(3, columns, device=torch.device("cpu"))
            meeting.wait()
            return partials, take_sum(partials, columns, (Segment(0, 0, columns),))

        key = ("test_threads", columns)
        with batched_sums(key, torch.device("cpu")):
            assert ask()[1] is None
            meeting.wait()
        with batched_sums(key, torch.device("cpu")):
            partials, result = ask()
            meeting.wait()
        assert result is not None
        return partials, result

    with ThreadPoolExecutor(2) as pool:
        (first, first_sum), (second, second_sum) = pool.map(work, (24, 70))
    assert (first.shape, first_sum.shape, second.shape, second_sum.shape) == ((3, 24), (24,), (3, 70), (70,))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
