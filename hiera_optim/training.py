"""One optimizer step of MAE training: masks, forward, backward, all-reduce, clipping, update.

`TrainStep` is the same code eager and captured: capture records what the eager step launches into CUDA graphs
and replays it. Everything that changes between steps (inputs, sample ids, learning rate, step counter) lives in
device memory, and nothing in a step waits for the host.

Masks and stochastic depth are functions of (seed, sample id) alone, so a run gives a sample the same ones on any number
of ranks, at any accumulation, and after a resume. The exception is a model that overrides methods of FAIR's: it gets
the same masks, but draws stochastic depth, and whatever else it draws, from torch's global generator, which nothing
here seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hiera_optim.dispatch import use_kernels
from hiera_optim.encoder import branch_probabilities, drop_path_scales, keep_probabilities
from hiera_optim.geometry import Geometry
from hiera_optim.gradients import GradientReducer
from hiera_optim.mae import masked_loss
from hiera_optim.masks import sample_mask, sample_noise
from hiera_optim.ops._launch import on_device_of
from hiera_optim.optim.flat import FlatOptimizer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Names of the dtypes a model can be trained in."""


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step reports, as 0-d device tensors that the next step overwrites."""

    loss: Tensor
    """Mean loss over the global batch (fp32)."""
    grad_norm: Tensor
    """L2 norm of the averaged gradient before clipping (fp32)."""
    nonfinite: Tensor
    """1.0 if this rank's own loss was not finite, else 0.0 (fp32)."""


@cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps up to 96 MiB for every stream it has run on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class TrainStep:
    """Runs MAE training steps on `model`, eager or as CUDA graphs.

    Call it once a micro-batch; each `accumulation`-th call updates the weights and returns a `StepOutput`, the
    others return None. The gradient is averaged over accumulation and over the ranks of `process_group`.

    Args:
        model: an optimised FAIR `MaskedAutoencoderHiera` (see `hiera_optim.optimize`), in the precision to train in.
        optimizer: a flat optimizer over the model's parameters; its `lr` is a device tensor.
        micro_batch: samples in a call.
        accumulation: calls in an optimizer step.
        mask_ratio: fraction of mask units dropped.
        seed: seed of the masks and of stochastic depth; of the masks alone for a model that overrides methods of
            FAIR's, whose stochastic depth torch's global generator decides.
        clip_grad_norm: largest gradient norm, or None.
        precision: "bf16" computes in bfloat16, "fp32" in float32; the model's parameters must have that dtype. Labels
            are computed in fp32 from the inputs' own precision either way.
        capture: record the step into CUDA graphs; needs a CUDA device.
        process_group: ranks to average over; None for all ranks when torch.distributed is initialised.

    Raises:
        ValueError: for a batch or a precision that does not fit the model, in one line.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatOptimizer,
        *,
        micro_batch: int,
        accumulation: int = 1,
        mask_ratio: float = 0.6,
        seed: int = 0,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        capture: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if micro_batch < 1 or accumulation < 1:
            raise ValueError(f"micro_batch and accumulation must be at least 1, not {micro_batch} and {accumulation}")
        parameter = next(model.parameters())
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, not {precision!r}")
        dtype = PRECISIONS[precision]
        if parameter.dtype != dtype:
            raise ValueError(f"precision {precision} needs {dtype} parameters, but the model has {parameter.dtype}")
        if capture and parameter.device.type != "cuda":
            raise ValueError(f"capture needs a CUDA device, but the model is on {parameter.device}")
        self.model = model
        self.optimizer = optimizer
        self.geometry = Geometry.from_model(model)
        self.micro_batch, self.accumulation = micro_batch, accumulation
        self.mask_ratio, self.seed, self.clip_grad_norm = mask_ratio, seed, clip_grad_norm
        self.capture = capture
        device = parameter.device
        shape = (micro_batch, self.geometry.in_chans, *self.geometry.input_size)
        self._x = torch.zeros(shape, dtype=dtype, device=device)
        self._ids = torch.zeros(micro_batch, dtype=torch.int64, device=device)
        self._loss_sum = torch.zeros((), device=device)
        self._report = torch.zeros(3, device=device)
        self._output = StepOutput(*self._report.unbind())
        self._grad_scale = torch.ones((), device=device)
        self._reducer = GradientReducer(optimizer, process_group=process_group)
        self._kernels = use_kernels(model, self.geometry, device)
        # Where FAIR's methods are overridden, a subclass decides how stochastic depth is drawn.
        self._drop_path = any(getattr(m, "drop_prob", 0.0) for m in model.modules()) and (
            self._kernels or getattr(model, "_hiera_overrides", None) == frozenset()
        )
        self._keep_probabilities = branch_probabilities(keep_probabilities(model), device)
        self._direct: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._kernels:
            # Triton is loaded only where kernels run
            from hiera_optim import fast
            from hiera_optim.ops.library import GradientSink, direct_gradients
            from hiera_optim.ops.sample_masks import sample_masks

            self._fast, self._sample_masks = fast, sample_masks
            sink = GradientSink(
                {p.data_ptr(): p.grad for p in model.parameters() if p.grad is not None},
                self._reducer.ready,
                accumulate=accumulation > 1 and not optimizer.sums_in_fp32,
            )
            self._direct = partial(direct_gradients, sink)
        self._micro_index = 0
        self._graphs: dict[str, Any] = {}
        # A stream of its own: cuBLAS keeps a workspace a stream, in the memory of the graph that used it first.
        self._stream: torch.cuda.Stream | None = None

    # -- the step -------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, sample_ids: Tensor) -> StepOutput | None:
        """Runs one micro-batch.

        After an error the unfinished step's gradients are gone, the weights are as before it unless the optimizer
        itself failed, and the next call starts a new step.

        Args:
            x: [micro_batch, in_chans, *input_size], float32 or the model's dtype, any device; pinned host memory
                copies asynchronously. The first call's dtype decides the precision of the labels.
            sample_ids: [micro_batch] int64, the samples' global numbers; they decide the masks.

        Returns:
            The step's report on the last micro-batch of an optimizer step, else None.
        """
        last = self._micro_index == self.accumulation - 1
        name = "update" if last else "accumulate"
        body = self._update if last else self._accumulate
        with on_device_of(self._x):
            self._load(x, sample_ids)
            try:
                if self.capture:
                    self._replay(name, body)
                else:
                    body()
            except Exception:
                self._micro_index = 0
                self.optimizer.zero_grad()
                self._loss_sum.zero_()
                raise
        self._micro_index = (self._micro_index + 1) % self.accumulation
        return self._output if last else None

    def _load(self, x: Tensor, sample_ids: Tensor) -> None:
        if x.shape != self._x.shape or sample_ids.shape != self._ids.shape:
            raise ValueError(
                f"this step takes x {tuple(self._x.shape)} and sample_ids {tuple(self._ids.shape)}, not "
                f"{tuple(x.shape)} and {tuple(sample_ids.shape)}; make a new TrainStep for another batch"
            )
        if x.dtype == torch.float32 != self._x.dtype and not self._graphs:
            self._x = self._x.float()
        self._x.copy_(x, non_blocking=True)
        self._ids.copy_(sample_ids, non_blocking=True)

    def forward_backward(self) -> None:
        """The step without its update, for benchmarks: the gradients of one micro-batch, overwritten each time."""
        self.optimizer.zero_grad()
        with self._reducer.reduce_in_backward():
            self._backward()
        self._report[0] = self._loss_sum
        self._loss_sum.zero_()

    def _backward(self) -> None:
        loss = self._loss(self._x, self._ids)
        self._loss_sum += loss.detach() / self.accumulation
        with self._direct():
            torch.autograd.backward(loss / self.accumulation)

    def _accumulate(self) -> None:
        self._backward()
        self._reducer.accumulate()

    def _update(self) -> None:
        with self._reducer.reduce_in_backward():
            self._backward()
        optimizer, world = self.optimizer, self._reducer.world_size
        norm = optimizer.grad_norm() / world
        self._report[2] = (~torch.isfinite(self._loss_sum)).float()
        self._report[0] = self._reducer.mean(self._loss_sum)
        self._report[1] = norm
        self._grad_scale.fill_(1 / world)
        if self.clip_grad_norm is not None:
            # torch.nn.utils.clip_grad_norm_'s coefficient: max_norm / (norm + 1e-6), at most 1
            self._grad_scale *= (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step(self._grad_scale, zero_grad=True)
        self._loss_sum.zero_()

    def _loss(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        """Loss of one batch with the masks of its sample ids: 0-d fp32."""
        geometry, model = self.geometry, self.model
        kept = geometry.num_kept_for_loss(self.mask_ratio)
        units = geometry.num_mask_units
        scales = None
        if self._drop_path and model.training:
            noise = sample_noise(sample_ids, len(self._keep_probabilities), self.seed)
            scales = drop_path_scales(self._keep_probabilities, noise.t())
        if self._kernels:
            mask, keep_idx, drop_idx, slot, drop_slot = self._sample_masks(sample_ids, units, kept, self.seed)
            return self._fast.mae_loss(model, geometry, x, mask, keep_idx, drop_idx, scales, (slot, drop_slot))[0]
        mask, keep_idx, drop_idx = sample_mask(sample_ids, units, kept, self.seed)
        if scales is not None:
            return masked_loss(model, geometry, x, mask, keep_idx, drop_idx, scales).float()
        loss: Tensor = model(x, mask_ratio=self.mask_ratio, mask=mask, keep_idx=keep_idx)[0]
        return loss.float()

    @torch.no_grad()
    def evaluate(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        """Mean loss of one batch in evaluation mode, with the masks of its sample ids: 0-d fp32 on the device."""
        training = self.model.training
        self.model.eval()
        try:
            device, dtype = self._x.device, x.dtype if x.is_floating_point() else self._x.dtype
            with on_device_of(self._x):
                return self._loss(x.to(device, dtype, non_blocking=True), sample_ids.to(device, non_blocking=True))
        finally:
            self.model.train(training)

    # -- capture --------------------------------------------------------------------------------------------

    def _replay(self, name: str, body: Callable[[], None]) -> None:
        if name not in self._graphs:
            self._graphs[name] = self._record(body)
        self._graphs[name].replay()

    def _record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warms `body` up on a side stream, undoes what that did to weights and state, and records it."""
        saved = self._snapshot()
        before, stream = torch.cuda.current_stream(), _warm_up_stream(self._x.device)
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    body()
        finally:
            before.wait_stream(stream)
            torch.cuda.synchronize()
            self._restore(saved)
        del saved  # its memory is needed for the graph
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g in self._graphs.values()), None)
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            # only this thread's calls count: others pin memory for the next batches, and NCCL's watchdog queries events
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                body()
        finally:
            # a capture that cannot be ended leaves its stream current
            torch.cuda.set_stream(before)
        # recording runs nothing, so the state is still as restored
        return graph

    def _snapshot(self) -> list[tuple[Tensor, Tensor]]:
        tensors = [*self.optimizer.buffers(), self._loss_sum, self._report]
        return [(t, t.clone()) for t in tensors]

    @staticmethod
    def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, copy in saved:
            tensor.copy_(copy)

    def release(self) -> None:
        """Frees the recorded graphs and their memory; the next call records anew."""
        self._graphs.clear()
