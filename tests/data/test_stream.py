"""The stream: the same samples on any number of ranks, from any step on, without leaks or lost errors."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.data.stream import Stream, source_index, validation


class Recorder:
    """Samples of one number, index + key / 2**64; optionally slow, or broken at one index."""

    def __init__(self, length: int, broken: int | None = None, delay: float = 0.0) -> None:
        self.length, self.broken, self.delay = length, broken, delay
        self.bad_files = 0
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        self.reads += 1
        if index == self.broken:
            raise RuntimeError(f"broken at {index}")
        if self.delay:
            time.sleep(self.delay)
        return np.full((1, 2), index + key / 2.0**64, dtype=np.float32)

    def name(self, index: int) -> str:
        return f"sample {index}"


def take(
    steps: int,
    *,
    source: Recorder | None = None,
    global_batch: int = 12,
    micro_batch: int = 3,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
    seed: int = 0,
    train: bool = True,
    threads: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    stream = Stream(
        source or Recorder(50),
        global_batch=global_batch,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
        seed=seed,
        train=train,
        threads=threads,
        prefetch=2,
    )
    try:
        batches = [next(stream) for _ in range(steps * global_batch // (world_size * micro_batch))]
    finally:
        stream.close()
    return torch.cat([x for x, _ in batches]), torch.cat([ids for _, ids in batches])


def test_shapes_and_dtypes() -> None:
    x, ids = take(1, micro_batch=12)
    assert x.shape == (12, 1, 2)
    assert x.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert ids.tolist() == list(range(12))


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (1, 1), (2, 3), (2, 6), (3, 4), (4, 1), (12, 1)])
def test_ranks_together_read_the_same_global_batches(world_size: int, micro_batch: int) -> None:
    alone_x, alone_ids = take(5)
    by_id = dict(zip(alone_ids.tolist(), alone_x[:, 0, 0].tolist(), strict=True))
    seen: list[int] = []
    for rank in range(world_size):
        x, ids = take(5, rank=rank, world_size=world_size, micro_batch=micro_batch)
        for step, step_ids in enumerate(ids.view(5, -1)):
            assert ((step_ids >= step * 12) & (step_ids < (step + 1) * 12)).all()
        assert [by_id[i] for i in ids.tolist()] == x[:, 0, 0].tolist()
        seen += ids.tolist()
    assert sorted(seen) == list(range(60))


def test_every_sample_once_an_epoch_through_resumes_and_other_world_sizes() -> None:
    """48 samples, 12 a step, interrupted twice inside the first epoch."""
    source = Recorder(48)
    indices: list[int] = []
    for start_step, steps, world_size in [(0, 1, 1), (1, 2, 2), (3, 1, 4), (4, 4, 2)]:
        for rank in range(world_size):
            x, _ = take(steps, source=source, start_step=start_step, world_size=world_size, rank=rank, micro_batch=3)
            indices += x[:, 0, 0].int().tolist()
    assert Counter(indices[:48]) == Counter(range(48))
    assert Counter(indices) == Counter(dict.fromkeys(range(48), 2))


def test_resuming_gives_what_would_have_come() -> None:
    whole, _ = take(9)
    rest, ids = take(4, start_step=5)
    assert torch.equal(whole[60:], rest)
    assert ids[0] == 60


def test_order_differs_by_epoch_and_seed_and_augmentation_by_sample_number() -> None:
    source = Recorder(12)
    x, _ = take(2, source=source)
    epochs = x[:, 0, 0].view(2, 12)
    assert epochs[0].int().tolist() != epochs[1].int().tolist()
    fractions = [{int(v): float(v % 1) for v in epoch} for epoch in epochs]
    assert all(fractions[0][i] != fractions[1][i] for i in range(12))
    other, _ = take(1, source=source, seed=1)
    assert other[:, 0, 0].int().tolist() != epochs[0].int().tolist()


def test_batches_larger_than_the_data_are_whole() -> None:
    x, _ = take(1, source=Recorder(5), global_batch=10, micro_batch=10)
    assert Counter(x[:, 0, 0].int().tolist()) == Counter(dict.fromkeys(range(5), 2))


def test_without_shuffling_the_source_order_is_kept() -> None:
    x, _ = take(2, source=Recorder(10), global_batch=6, micro_batch=6, train=False)
    assert x[:, 0, 0].int().tolist() == [*range(10), 0, 1]


def test_sample_numbers_beyond_32_bits() -> None:
    _, ids = take(1, start_step=2**40)
    assert ids[0] == 12 * 2**40


def test_number_of_threads_changes_nothing() -> None:
    assert torch.equal(take(4, threads=1)[0], take(4, threads=7)[0])


def test_batch_must_divide() -> None:
    with pytest.raises(ValueError, match="global_batch 12 is not a multiple of world_size 2 \\* micro_batch 5"):
        take(1, micro_batch=5, world_size=2)


def test_errors_reach_the_consumer_and_threads_end() -> None:
    with pytest.raises(RuntimeError, match="broken at 7"):
        take(20, source=Recorder(50, broken=7))
    assert not data_threads()


def test_close_is_idempotent_prompt_and_leaves_no_threads() -> None:
    source = Recorder(50, delay=0.02)
    stream = Stream(
        source,
        global_batch=40,
        micro_batch=40,
        rank=0,
        world_size=1,
        start_step=0,
        seed=0,
        threads=2,
        prefetch=4,
    )
    next(stream)
    assert data_threads()
    reads = source.reads
    stream.close()
    stream.close()
    assert not data_threads()
    # Readers stop after the sample in hand, they do not finish the 120 queued ones.
    assert source.reads <= reads + 4
    with pytest.raises(StopIteration):
        next(stream)


def test_reads_ahead_a_bounded_number_of_batches() -> None:
    source = Recorder(50)
    stream = Stream(
        source,
        global_batch=5,
        micro_batch=5,
        rank=0,
        world_size=1,
        start_step=0,
        seed=0,
        threads=2,
        prefetch=3,
    )
    next(stream)
    deadline = time.monotonic() + 10
    # Three batches and the one sample that tells the shape.
    while source.reads < 16 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert source.reads == 16
    stream.close()


def test_waiting_is_measured() -> None:
    stream = Stream(
        Recorder(50, delay=0.02),
        global_batch=4,
        micro_batch=4,
        rank=0,
        world_size=1,
        start_step=0,
        seed=0,
        threads=1,
    )
    next(stream)
    assert stream.wait_seconds >= 0.08
    assert stream.bad_files == 0
    stream.close()


@pytest.mark.parametrize(("world_size", "micro_batch", "samples"), [(1, 4, 10), (2, 4, 10), (3, 2, 10), (2, 16, 5)])
def test_validation_is_fixed_static_and_complete(world_size: int, micro_batch: int, samples: int) -> None:
    source = Recorder(40)
    expected = {int(i) for _, ids, real in batches(source, 1, 0, 1, samples) for i in ids[:real]}
    assert len(expected) == samples
    counted: list[int] = []
    lengths = set()
    for rank in range(world_size):
        mine = batches(source, micro_batch, rank, world_size, samples)
        lengths.add(len(mine))
        for x, ids, real in mine:
            assert x.shape == (micro_batch, 1, 2)
            assert x[:, 0, 0].int().tolist() == ids.tolist()
            counted += ids[:real].tolist()
            if real:
                assert set(ids[real:].tolist()) <= set(ids[:real].tolist())
    assert len(lengths) == 1
    assert sorted(counted) == sorted(expected)
    assert not data_threads()


def test_validation_uses_all_of_a_small_source_once() -> None:
    assert sum(real for _, _, real in batches(Recorder(7), 4, 0, 1, 1000)) == 7


def batches(
    source: Recorder, micro_batch: int, rank: int, world_size: int, samples: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return list(validation(source, micro_batch=micro_batch, rank=rank, world_size=world_size, samples=samples))


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hiera-data")]


def test_a_samples_number_leads_back_to_its_index() -> None:
    """Over several epochs: 240 numbers of 50 samples."""
    x, sample_ids = take(20, seed=3)
    indices = x[:, 0, 0].floor().int().tolist()
    assert indices == [source_index(number, 50, 3) for number in sample_ids.tolist()]
    assert indices != [source_index(number, 50, 4) for number in sample_ids.tolist()]
