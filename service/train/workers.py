"""The ranks of a run: joining them, and what they agree on.

Gradients go over the default process group (NCCL or gloo) inside the step. Everything here goes over a
second gloo group on host memory, so that it neither waits for the GPU nor mixes with the step's
collectives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from service.config.schema import RuntimeSection
from service.errors import UserError
from service.launch.state import ATTEMPT_VARIABLE
from service.train.allocator import verify_allocator
from service.train.signals import StopRequest

FIRST_STEP_TIMEOUT_SECONDS = 3600.0
"""Collective timeout until the first step is done: nodes with cold caches may compile many minutes longer."""


@dataclass(frozen=True)
class Workers:
    """This process among the ranks of the run."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None
    """gloo group for host-side agreement, None for a single process."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in the order of ranks."""
        own = torch.tensor(list(values), dtype=torch.int64)
        if self.control is None:
            return [own.tolist()]
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self.control)
        return [t.tolist() for t in everyone]

    def from_first(self, values: Sequence[int]) -> list[int]:
        """The integers that rank 0 passed."""
        return self.gather(values)[0]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, in double precision."""
        own = torch.tensor(list(values), dtype=torch.float64)
        if self.control is not None:
            dist.all_reduce(own, group=self.control)
        return [float(v) for v in own]


def join_workers(runtime: RuntimeSection) -> Workers:
    """Joins the process group that torchrun describes in the environment; a single process needs none.

    Raises:
        UserError: runtime.device or runtime.nproc_per_node asks for GPUs that are not there, or the CUDA
            allocator does not run with runtime.allocator.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(runtime, local_rank)
    control: dist.ProcessGroup | None = None
    if world_size > 1:
        timeout = timedelta(seconds=max(runtime.collective_timeout_seconds, FIRST_STEP_TIMEOUT_SECONDS))
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        control = group
    return Workers(rank, local_rank, world_size, device, control)


def _device(runtime: RuntimeSection, local_rank: int) -> torch.device:
    if runtime.device == "cpu" or (runtime.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("runtime.device is cuda, but torch sees no GPU; set it to cpu or check the driver")
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"runtime.nproc_per_node asks for more workers than the {count} GPUs of this node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if ATTEMPT_VARIABLE in os.environ:  # started by the launcher, whose settings these are
        verify_allocator()
    return device


def shorten_timeouts(workers: Workers, runtime: RuntimeSection) -> None:
    """After the first step: from now on a rank that stays away this long is lost."""
    if workers.control is None:
        return
    timeout = timedelta(seconds=runtime.collective_timeout_seconds)
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, dist.group.WORLD)
    set_timeout(timeout, workers.control)


def leave_workers() -> None:
    """Leaves the process group at the end of a run that ended well, all ranks together.

    Together, because torchrun takes a rank that leaves with a non-zero code for a reason to end the others,
    and rank 0 may still be writing the checkpoint.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def check_same_weights(workers: Workers, tensors: dict[str, Tensor]) -> None:
    """Compares a checksum of fp32 tensors across ranks.

    Raises:
        RuntimeError: a rank has other weights than rank 0; training would silently average different models.
    """
    bits = (t.detach().contiguous().view(torch.int32) for t in tensors.values())
    checksum = sum(int(b.sum(dtype=torch.int64)) for b in bits)
    sums = [values[0] for values in workers.gather([checksum % 2**62])]
    different = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if different:
        raise RuntimeError(f"ranks {different} start from other weights than rank 0")


class BoundaryVote:
    """What all ranks agree on at each step boundary, one boundary late so that nobody waits.

    Each rank casts (stop signal, save wanted); the maximum over ranks of what was cast at one boundary is
    known at the next, when every rank has long sent it. Every rank calls `cast` equally often.
    """

    def __init__(self, workers: Workers) -> None:
        self._control = workers.control
        self._work: dist.Work | None = None
        self._votes = torch.zeros(2, dtype=torch.int64)
        self.stop_signal = 0
        """Number of a stop signal that some rank received, once all ranks know of it; else 0."""
        self.save_wanted = False
        """Some rank wanted a checkpoint; stays until `saved`."""

    def cast(self, stop_signal: int, save: bool) -> None:
        """Takes in the result of the last vote and starts the next."""
        self.take_in()
        self._votes = torch.tensor([stop_signal, int(save and not self.save_wanted)], dtype=torch.int64)
        if self._control is None:
            self.take_in()
        else:
            self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._control, async_op=True)

    def take_in(self) -> None:
        """Waits for the vote under way and takes in its result."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, save = self._votes.tolist()
        self.stop_signal = self.stop_signal or stop
        self.save_wanted = self.save_wanted or bool(save)
        self._votes = torch.zeros(2, dtype=torch.int64)

    def stopping(self, stop: StopRequest) -> bool:
        """A vote inside a boundary, for work that takes longer than a step."""
        self.cast(stop.number, save=False)
        return self.stop_signal != 0

    def saved(self) -> None:
        """A checkpoint was taken at this boundary."""
        self.save_wanted = False
