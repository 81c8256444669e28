"""One endless stream of global sample numbers, of which each rank reads its slice.

Sample number g = step * global_batch + i. With N samples in an epoch its epoch is g // N and its position g
% N; the sample read there is given by a permutation keyed by (seed, epoch), and its augmentation by a key
from (seed, g). So the order needs no saved state, is the same on any number of ranks, and a run can be
resumed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from service.data import hashing
from service.data.prefetch import BatchPlan, Prefetcher
from service.data.source import Source


class Stream(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """The micro-batches of one rank, from optimizer step `start_step` on.

    A step has global_batch / (world_size * micro_batch) of them. Iterating gives (x float32 [micro_batch,
    C, *size], sample_ids int64 [micro_batch]), without end. Over all ranks and all micro-batches of step n,
    sample_ids are n * global_batch … (n + 1) * global_batch - 1, each once.

    Args:
        start_step: the first optimizer step to read.
        train: shuffle every epoch; otherwise samples come in the source's order.
        threads: reading threads.
        prefetch: micro-batches read ahead.
        pin: use page-locked memory, which a GPU copies from asynchronously.

    Raises:
        ValueError: global_batch is not a multiple of world_size * micro_batch.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        seed: int,
        train: bool = True,
        threads: int = 8,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        if micro_batch < 1 or global_batch % (world_size * micro_batch):
            raise ValueError(
                f"global_batch {global_batch} is not a multiple of world_size {world_size} * micro_batch {micro_batch}"
            )
        plans = _plans(len(source), global_batch, micro_batch, rank, world_size, start_step, seed, train)
        self._batches = Prefetcher(source, plans, threads=threads, prefetch=prefetch, pin=pin)

    @property
    def wait_seconds(self) -> float:
        """Seconds the training loop has waited for data so far."""
        return self._batches.wait_seconds

    @property
    def bad_files(self) -> int:
        """Unreadable files met so far on this rank, each counted once."""
        return self._batches.bad_files

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(self._batches)
        return batch.x, batch.sample_ids

    def close(self) -> None:
        """Stop reading and join the threads; the stream ends. May be called again."""
        self._batches.close()


def source_index(sample: int, length: int, seed: int) -> int:
    """Which sample of a training source of `length` the run's sample number `sample` is."""
    epochs, positions = np.divmod(np.array([sample], dtype=np.int64), length)
    return int(_shuffled(positions, epochs, length, hashing.derive(seed, hashing.ORDER))[0])


def validation(
    source: Source,
    *,
    micro_batch: int,
    rank: int,
    world_size: int,
    samples: int,
    threads: int = 4,
    pin: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """The held-out batches of one rank: the same samples at every call and on any number of ranks.

    Gives (x float32 [micro_batch, C, *size], sample_ids int64 [micro_batch], real). Only the first `real`
    samples of a batch count. The rest repeat the batch's own real samples in turn, so that shapes never
    change, and should get weight 0: weight the mean loss of a batch by `real` (exact when real divides
    micro_batch), or mask the rest. All ranks get the same number of batches, some perhaps with real = 0.

    Args:
        samples: how many to use; all of the source when it has fewer. They are spread over the source, so
            that a folder sorted by class is not judged by its first class.
    """
    total = min(samples, len(source))
    order = hashing.permute(
        np.arange(total, dtype=np.int64), len(source), np.uint64(hashing.derive(hashing.VALIDATION))
    )
    stride = micro_batch * world_size

    def plans() -> Iterator[BatchPlan]:
        for start in range(rank * micro_batch, -(-total // stride) * stride, stride):
            real = max(0, min(micro_batch, total - start))
            first = start if real else 0
            positions = first + np.arange(micro_batch, dtype=np.int64) % max(real, 1)
            indices = order[positions]
            yield BatchPlan(indices.tolist(), [0] * micro_batch, indices, real)

    batches = Prefetcher(source, plans(), threads=threads, prefetch=2, pin=pin)
    try:
        for batch in batches:
            yield batch.x, batch.sample_ids, batch.real
    finally:
        batches.close()


def _plans(
    epoch_samples: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    start_step: int,
    seed: int,
    train: bool,
) -> Iterator[BatchPlan]:
    order_key = hashing.derive(seed, hashing.ORDER)
    augment_key = hashing.derive(seed, hashing.AUGMENT)
    share = global_batch // world_size
    step = start_step
    while True:
        first = step * global_batch + rank * share
        for start in range(first, first + share, micro_batch):
            numbers = np.arange(start, start + micro_batch, dtype=np.int64)
            epochs, positions = np.divmod(numbers, epoch_samples)
            indices = positions
            if train:
                indices = _shuffled(positions, epochs, epoch_samples, order_key)
            keys = hashing.derive_many(augment_key, numbers)
            yield BatchPlan(indices.tolist(), keys.tolist(), numbers, micro_batch)
        step += 1


def _shuffled(
    positions: NDArray[np.int64], epochs: NDArray[np.int64], length: int, order_key: int
) -> NDArray[np.int64]:
    """int64 [n]: the indices at these positions of these epochs."""
    return hashing.permute(positions, length, hashing.derive_many(order_key, epochs))
