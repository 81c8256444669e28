"""One flat buffer for all parameters and one for all gradients.

A Hiera MAE has some 400 parameters, most of them small. Laid end to end they are one tensor: the optimizer is
one kernel, clipping is one norm, and an all-reduce takes slices of any size without packing.

The order of the buffer: groups ("decay", "no_decay", ...) are contiguous ranges, and inside a group the
parameters stand in reverse order of registration. Backward reaches the last layer first, so the gradient
becomes final from the front to the back, which is what `FlatParameters.buckets` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Elements; every parameter starts at a multiple, so that 16-byte accesses never straddle two of them."""


@dataclass(frozen=True)
class Entry:
    """Place of one parameter in the flat buffers, in elements."""

    name: str
    parameter: nn.Parameter
    group: str
    offset: int

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def end(self) -> int:
        return self.offset + self.parameter.numel()

    def view(self, flat: Tensor, base: int = 0) -> Tensor:
        """This parameter's part of a flat tensor whose first element has offset `base`."""
        return flat[self.offset - base : self.end - base].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradient, from `offset` on, and the parameters whose gradients fill it."""

    grad: Tensor
    parameters: list[nn.Parameter]
    offset: int
    entries: slice


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class FlatParameters:
    """Moves parameters into one flat buffer and gives them persistent gradients in another.

    The nn.Parameter objects stay the same; only `p.data` and `p.grad` are re-pointed. Autograd then
    accumulates into `p.grad` in place. Parameters without requires_grad are left alone. A parameter listed
    twice (tied weights) is laid out once, under its first name. Move the model to its device and dtype first.

    Args:
        named_parameters: as from `model.named_parameters()`; one device, one dtype, bfloat16 or float32.
        groups: names of the groups in the order of their ranges.
        group_of: which group a parameter belongs to.

    Raises:
        ValueError: no parameters, mixed devices or dtypes, or two parameters that overlap in memory.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        groups: Sequence[str],
        group_of: Callable[[str, nn.Parameter], str],
    ) -> None:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                unique.setdefault(id(parameter), (name, parameter))
        named = list(unique.values())
        _check_parameters(named)

        self.device, self.dtype = named[0][1].device, named[0][1].dtype
        self.entries: list[Entry] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        offset = 0
        for group in groups:
            start = offset
            for name, parameter in reversed(named):
                if group_of(name, parameter) == group:
                    self.entries.append(Entry(name, parameter, group, offset))
                    offset += _align(parameter.numel())
            self.ranges[group] = (start, offset)
        if len(self.entries) != len(named):
            raise ValueError(f"group_of returned a group that is not one of {', '.join(groups)}")

        # Padding between parameters is zero and stays zero: its gradient and moments are zero.
        self.flat = torch.zeros(offset, dtype=self.dtype, device=self.device)
        self.flat_grad = torch.zeros_like(self.flat)
        self._grad_views = [entry.view(self.flat_grad) for entry in self.entries]
        with torch.no_grad():
            for entry, grad_view in zip(self.entries, self._grad_views, strict=True):
                view = entry.view(self.flat)
                view.copy_(entry.parameter)
                entry.parameter.data = view
                if entry.parameter.grad is not None:
                    grad_view.copy_(entry.parameter.grad)
                entry.parameter.grad = grad_view
        self._pointers = [entry.parameter.data_ptr() for entry in self.entries]

    def __len__(self) -> int:
        """Elements of the flat buffers, padding included."""
        return self.flat.numel()

    def attach(self, part: slice = slice(None)) -> None:
        """Makes every `p.grad` the view into the flat gradient again.

        `zero_grad(set_to_none=True)` drops the views, and autograd then makes a tensor of its own. What
        `p.grad` holds is taken as true: it is copied into the flat gradient, None as zeros. `part` limits
        this to some of `entries`.

        Raises:
            RuntimeError: a parameter no longer lives in the flat buffer, or a gradient is elsewhere while a
                CUDA graph is being captured (it would hold addresses that the next step does not use).
        """
        parts = zip(self.entries[part], self._pointers[part], self._grad_views[part], strict=True)
        for entry, pointer, view in parts:
            if entry.parameter.data_ptr() != pointer:
                raise RuntimeError(
                    f"{entry.name} has left the optimizer's flat buffer: move or cast the model, "
                    "and load weights with assign=True, before the optimizer is built"
                )
            grad = entry.parameter.grad
            if grad is view:
                continue
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the gradient of {entry.name} is not in the flat buffer during capture: "
                    "use the optimizer's zero_grad(), not set_to_none=True"
                )
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
            entry.parameter.grad = view

    def zero_grad(self) -> None:
        """Zeroes the flat gradient in place and re-attaches gradients that were set to None."""
        for entry, view in zip(self.entries, self._grad_views, strict=True):
            if entry.parameter.grad is not view:
                entry.parameter.grad = view
        self.flat_grad.zero_()

    def buckets(self, nbytes: int) -> list[Bucket]:
        """Cuts the flat gradient into slices of about `nbytes`, in the order in which backward finishes them.

        Slices cover the buffer without gaps and never cross a group's end: the no-decay group has members in
        every layer and is final only when backward is.

        Raises:
            ValueError: nbytes is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"bucket size must be positive, got {nbytes} bytes")
        buckets: list[Bucket] = []
        size = nbytes // self.flat_grad.element_size()
        first = 0
        for i, entry in enumerate(self.entries):
            start, end = self.entries[first].offset, entry.offset + _align(entry.parameter.numel())
            if end - start >= size or end == self.ranges[entry.group][1]:
                parameters = [member.parameter for member in self.entries[first : i + 1]]
                buckets.append(Bucket(self.flat_grad[start:end], parameters, start, slice(first, i + 1)))
                first = i + 1
        return buckets


def _check_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    if not named:
        raise ValueError("the optimizer got no parameters that require a gradient")
    first_name, first = named[0]
    if first.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{first_name} is {first.dtype}; flat optimizers take float32 or bfloat16 parameters")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in named:
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}, but {first_name} is {first.dtype} on "
                f"{first.device}; flat optimizers need one dtype and one device"
            )
        if parameter.is_contiguous():
            start = parameter.data_ptr()
            spans.append((start, start + parameter.numel() * parameter.element_size(), name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(f"{name} and {other} share memory but are two parameters: tie them as one nn.Parameter")


@dataclass(frozen=True)
class Slot:
    """One kind of optimizer state: a flat float32 tensor over some entries."""

    flat: Tensor
    base: int
    entries: list[Entry]


class FlatOptimizer:
    """What AdamW and Muon share: buffers, learning rate, step count, gradient norm, and state by name.

    `lr` (0-d float32) and `step_count` (0-d int64) live on the parameters' device, and nothing here waits for
    the device, so that a step can be captured in a CUDA graph: set the rate by `optimizer.lr.fill_(value)`.

    Args:
        params: the flat parameters.
        lr: first learning rate.
        master: keep float32 master weights when the parameters are bfloat16.
        fp32_accumulation: keep a float32 buffer beside a bfloat16 gradient; call `accumulate()` after each
            backward, and the norm and the step read the sum.
    """

    def __init__(self, params: FlatParameters, *, lr: float, master: bool, fp32_accumulation: bool = False) -> None:
        if not lr >= 0:
            raise ValueError(f"learning rate must not be negative, got {lr}")
        self.params = params
        self.lr = torch.tensor(lr, dtype=torch.float32, device=params.device)
        self.step_count = torch.zeros((), dtype=torch.int64, device=params.device)
        narrow = params.dtype != torch.float32
        self.master: Tensor | None = params.flat.float() if master and narrow else None
        self._sum: Tensor | None = None
        if fp32_accumulation and narrow:
            self._sum = torch.zeros_like(params.flat, dtype=torch.float32)
        self.slots: dict[str, Slot] = {}

    def add_slot(self, name: str, groups: Collection[str]) -> Tensor:
        """Makes a zeroed float32 state tensor over adjacent groups and registers it for state_dict()."""
        spans = [self.params.ranges[group] for group in groups]
        base, end = min(start for start, _ in spans), max(end for _, end in spans)
        flat = torch.zeros(end - base, dtype=torch.float32, device=self.params.device)
        self.slots[name] = Slot(flat, base, [entry for entry in self.params.entries if entry.group in groups])
        return flat

    @property
    def flat_grads(self) -> list[Tensor]:
        """The gradients that step() will read, as flat tensors (one today)."""
        if self._sum is not None:
            return [self._sum]
        self.params.attach()
        return [self.params.flat_grad]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Adds the bfloat16 gradient to the float32 sum and zeroes it; does nothing without that sum."""
        if self._sum is None:
            return
        self.params.attach()
        self._sum.add_(self.params.flat_grad)
        self.params.flat_grad.zero_()

    @torch.no_grad()
    def bucket_gradient(self, bucket: Bucket) -> Tensor:
        """The slice that step() will read of a bucket whose gradients are final, for an all-reduce.

        With float32 accumulation, adds the bucket's bfloat16 gradient to the sum first and zeroes it.
        """
        self.params.attach(bucket.entries)
        if self._sum is None:
            return bucket.grad
        total = self._sum[bucket.offset : bucket.offset + bucket.grad.numel()]
        total.add_(bucket.grad)
        bucket.grad.zero_()
        return total

    def buffers(self) -> list[Tensor]:
        """Every tensor that backward or step() changes: what has to be kept to undo a step."""
        optional = [t for t in (self.master, self._sum) if t is not None]
        slots = [slot.flat for slot in self.slots.values()]
        return [self.params.flat, self.params.flat_grad, self.step_count, *optional, *slots]

    @property
    def sums_in_fp32(self) -> bool:
        """Gradients of several backward passes are summed in a float32 buffer."""
        return self._sum is not None

    def zero_grad(self) -> None:
        """Zeroes all gradients in place; the buffers and the views of them stay."""
        self.params.zero_grad()
        if self._sum is not None:
            self._sum.zero_()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """L2 norm of the gradient over all parameters: 0-d float32, the same bits for the same gradient."""
        (grad,) = self.flat_grads
        if grad.is_cuda:
            whole: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
            return whole
        # Rows first: one running float32 sum over 10^7 squares would lose three digits.
        rows = torch.linalg.vector_norm(grad.view(-1, ALIGNMENT), dim=1, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(rows)
        return norm

    @torch.no_grad()
    def step(self, grad_scale: Tensor | None = None, *, zero_grad: bool = False) -> None:
        """Updates the parameters from their gradients.

        Args:
            grad_scale: 0-d float32 on the same device; the gradient is multiplied by it (clipping, averaging)
                while it is read. None: 1.
            zero_grad: leave the gradient zeroed, at no extra pass.
        """
        (grad,) = self.flat_grads
        self.step_count.add_(1)
        self._update(grad, grad_scale, zero_grad)

    def _update(self, grad: Tensor, grad_scale: Tensor | None, zero_grad: bool) -> None:
        raise NotImplementedError

    def state_dict(self, *, copy: bool = True) -> dict[str, Tensor]:
        """State as "<slot>.<parameter name>" float32 tensors plus "step" (0-d int64), whatever the layout.

        The tensors of one slot are views of one copy. copy=False: views of the live state, for a caller that copies
        them before the next step; it saves device memory of the state's size.
        """
        state = {"step": self.step_count.clone() if copy else self.step_count}
        for name, slot in self.slots.items():
            flat = slot.flat.clone() if copy else slot.flat
            state.update({f"{name}.{entry.name}": entry.view(flat, slot.base) for entry in slot.entries})
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads what state_dict() gave, all or nothing.

        Raises:
            ValueError: a key is missing, unknown, or its tensor has another shape.
        """
        targets = {"step": self.step_count}
        for name, slot in self.slots.items():
            targets.update({f"{name}.{entry.name}": entry.view(slot.flat, slot.base) for entry in slot.entries})
        _copy_strict(targets, state, "optimizer state")

    @torch.no_grad()
    def master_parameters(self, *, copy: bool = True) -> dict[str, Tensor]:
        """The most precise weights there are: float32, by parameter name. copy: as in `state_dict`."""
        source = self.params.flat if self.master is None else self.master
        flat = source.to(torch.float32, copy=copy)
        return {entry.name: entry.view(flat) for entry in self.params.entries}

    @torch.no_grad()
    def load_master_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets weights (and their float32 masters) from tensors by parameter name, all or nothing.

        Raises:
            ValueError: a key is missing, unknown, or its tensor has another shape.
        """
        target = self.params.flat if self.master is None else self.master
        _copy_strict({entry.name: entry.view(target) for entry in self.params.entries}, parameters, "weights")
        if self.master is not None:
            self.params.flat.copy_(self.master)


def _copy_strict(targets: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    for key, target in targets.items():
        if key not in source:
            raise ValueError(f"{what} lacks {key}")
        if source[key].shape != target.shape:
            raise ValueError(f"{what}: {key} has shape {list(source[key].shape)}, expected {list(target.shape)}")
    for key in source:
        if key not in targets:
            raise ValueError(f"{what} has an unknown entry {key}")
    for key, target in targets.items():
        target.copy_(source[key])
