"""Batches read ahead by threads, handed over in order.

Threads, not processes: Pillow's decoders and numpy's loops release the interpreter lock, and threads write
straight into the batch that the consumer gets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from service.data.source import Source


@dataclass(frozen=True)
class BatchPlan:
    """What one batch will hold: which samples of the source, their keys and ids, and how many are real."""

    indices: Sequence[int]
    keys: Sequence[int]
    sample_ids: NDArray[np.int64]
    real: int


@dataclass(frozen=True)
class Batch:
    """float32 x [micro_batch, C, *size] and int64 sample_ids [micro_batch]; the first `real` samples
    count."""

    x: torch.Tensor
    sample_ids: torch.Tensor
    real: int


class Prefetcher(Iterator[Batch]):
    """Iterate over the batches of `plans`, at most `prefetch` of them read or being read ahead.

    An exception in a reading thread is raised by `next` when that batch's turn comes, and ends the iteration.

    Args:
        source: what is read; its `read` runs in `threads` threads.
        pin: put batches in page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(self, source: Source, plans: Iterator[BatchPlan], *, threads: int, prefetch: int, pin: bool) -> None:
        self._source, self._plans = source, plans
        self._threads, self._prefetch, self._pin = max(1, threads), max(1, prefetch), pin
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hiera-data")
        self._ahead: deque[tuple[Batch, list[Future[None]]]] = deque()
        self._shape: tuple[int, ...] | None = None
        self._closed = False
        self.wait_seconds = 0.0
        """Seconds the consumer has waited for data so far."""

    @property
    def bad_files(self) -> int:
        """Files of the source found unreadable so far."""
        return self._source.bad_files

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        start = time.perf_counter()
        try:
            while len(self._ahead) < self._prefetch and (plan := next(self._plans, None)) is not None:
                self._ahead.append(self._start(plan))
            if not self._ahead:
                self.close()
                raise StopIteration
            batch, parts = self._ahead.popleft()
            for part in parts:
                part.result()
            return batch
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Stop reading and join the threads. May be called again, and from `finally`."""
        self._closed = True
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, plan: BatchPlan) -> tuple[Batch, list[Future[None]]]:
        count = len(plan.indices)
        if self._shape is None:
            self._shape = self._source.read(plan.indices[0], plan.keys[0]).shape
        x = torch.empty((count, *self._shape), dtype=torch.float32, pin_memory=self._pin)
        rows = x.numpy()

        def read(first: int, last: int) -> None:
            for i in range(first, last):
                if self._closed:
                    return
                rows[i] = self._source.read(plan.indices[i], plan.keys[i])

        # One part a thread: a batch is ready as early as it can be, at little cost for the queue.
        size = -(-count // self._threads)
        parts = [self._pool.submit(read, first, min(first + size, count)) for first in range(0, count, size)]
        sample_ids = torch.from_numpy(plan.sample_ids)
        return Batch(x, sample_ids.pin_memory() if self._pin else sample_ids, plan.real), parts
