"""Averages flat gradients over ranks, each slice as soon as backward has filled it.

`FlatOptimizer` keeps the gradients of all parameters in one buffer, ordered as backward produces them; this cuts it
into buckets and starts a bucket's all-reduce when its last parameter's gradient is there. Under CUDA graphs the
hooks run while the step is recorded, so the replayed graph holds the same overlap.

Not torch's DistributedDataParallel: that asserts when `static_graph=True` meets `no_sync()` (pytorch#187732), needs
eleven warm-up steps before capture, and copies between its own buckets and `.grad`. With the gradients already flat,
overlap is these few lines, and accumulation works under capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hiera_optim.optim.flat import Bucket, FlatOptimizer

BUCKET_BYTES = 32 << 20
"""Small enough that the last bucket, which nothing hides, is short; large enough for NVLink's full bandwidth."""


def _report(reducer: weakref.ref[GradientReducer], parameter: Tensor) -> None:
    """The hook of a parameter: its gradient is there."""
    alive = reducer()
    if alive is not None:
        alive.ready([parameter.data_ptr()])


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class GradientReducer:
    """Sums gradients over micro-batches and ranks.

    Args:
        optimizer: owner of the flat gradients. When it was built with fp32_accumulation, bf16 gradients of several
            micro-batches are summed, and all-reduced, in fp32.
        process_group: the ranks; None for all of them, or just this process when torch.distributed is not initialised.
    """

    def __init__(self, optimizer: FlatOptimizer, *, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = process_group
        distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(process_group) if distributed else 1
        self._optimizer = optimizer
        self._buckets = optimizer.params.buckets(BUCKET_BYTES)
        self._active = False
        self._works: list[dist.Work] = []
        # by address: a chain's fused backward writes gradients without autograd, and knows only those
        self._pointers = [frozenset(p.data_ptr() for p in bucket.parameters) for bucket in self._buckets]
        self._bucket_of = {pointer: i for i, pointers in enumerate(self._pointers) for pointer in pointers}
        self._waiting: list[set[int]] = []
        # The parameters' hooks live where the garbage collector does not look: they must not hold what they report to.
        hook = partial(_report, weakref.ref(self))
        parameters = (p for bucket in self._buckets for p in bucket.parameters)
        hooks = [p.register_post_accumulate_grad_hook(hook) for p in parameters]  # type: ignore[no-untyped-call]
        self._finalizer = weakref.finalize(self, _remove, hooks)

    def close(self) -> None:
        """Removes the hooks from the parameters, as happens when the reducer is no longer used."""
        self._finalizer()

    def accumulate(self) -> None:
        """Adds the gradients of a micro-batch that is not the step's last to the sum."""
        self._optimizer.accumulate()

    @contextmanager
    def reduce_in_backward(self) -> Iterator[None]:
        """Backward inside this context is the step's last: buckets are summed and all-reduced as they fill."""
        self._waiting = [set(pointers) for pointers in self._pointers]
        self._active = True
        try:
            yield
            # a parameter that the loss does not reach never calls its hook
            for i, left in enumerate(self._waiting):
                if left:
                    self._reduce(self._buckets[i])
        finally:
            self._active = False
            works, self._works = self._works, []
            for work in works:
                work.wait()

    def ready(self, pointers: list[int]) -> None:
        """Backward has written the gradients of the parameters at these addresses.

        Autograd calls the hook of a parameter that got None too, so a fused backward's parameters come twice: only the
        first time counts.
        """
        if not self._active:
            return
        for pointer in pointers:
            i = self._bucket_of[pointer]
            waiting = self._waiting[i]
            if pointer in waiting:
                waiting.remove(pointer)
                if not waiting:
                    self._reduce(self._buckets[i])

    def _reduce(self, bucket: Bucket) -> None:
        gradient = self._optimizer.bucket_gradient(bucket)
        if self.world_size > 1:
            work = dist.all_reduce(gradient, group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a 0-d tensor over the ranks, on the device."""
        if self.world_size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.world_size
