"""The fused kernels as PyTorch operators: visible to autograd, opaque to torch.compile.

Each operator's fake implementation gives shapes only, so that `torch.compile(fullgraph=True)` traces through; eager,
compiled and captured steps launch the same kernels.

`direct_gradients` lets a training step take a chain's parameter gradients straight into its own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hiera_optim import chain as ch
from hiera_optim import tables
from hiera_optim.chain import BlockSpec, Rows, Saved
from hiera_optim.encoder import drop_path_scales
from hiera_optim.ops import layer_norm, mae_loss, patch_embed, units
from hiera_optim.ops._operator import custom_op
from hiera_optim.ops.batched_sums import batched_sums
from hiera_optim.ops.column_sum import column_sum


class GradientSink:
    """Where `direct_gradients` sends gradients.

    Args:
        buffer_of: persistent gradient of each parameter, by the parameter's data pointer.
        ready: called with the gradients' data pointers when a chain's backward has written them.
        accumulate: add instead of overwrite.
    """

    def __init__(self, buffer_of: dict[int, Tensor], ready: Callable[[list[int]], None], accumulate: bool) -> None:
        self.buffer_of, self.ready, self.accumulate = buffer_of, ready, accumulate


# A plain global: autograd runs the backward of CUDA tensors in a thread of its own.
_sink: GradientSink | None = None


@contextmanager
def direct_gradients(sink: GradientSink) -> Iterator[None]:
    """Backward passes inside write chains' parameter gradients into the sink; autograd sees none for them."""
    global _sink
    if _sink is not None:
        raise RuntimeError("direct_gradients is already active: one training step at a time in a process")
    _sink = sink
    try:
        yield
    finally:
        _sink = None


# -- a run of blocks --------------------------------------------------------------------------------------------


def _rows(index: Tensor | None, slot: Tensor | None) -> Rows | None:
    return Rows(index, slot) if index is not None and slot is not None else None


def _flatten(saved: list[Saved]) -> list[Tensor]:
    """All saved tensors but the first block's `s`: that is the chain's input."""
    return [t for kept in saved for t in kept.tensors()][1:]


def _unflatten(x: Tensor, flat: list[Tensor]) -> list[Saved]:
    tensors = [x, *flat]
    return [Saved(*tensors[i : i + ch.SAVED]) for i in range(0, len(tensors), ch.SAVED)]


@custom_op("hiera_optim::chain")
def chain(
    x: Tensor, parameters: list[Tensor], specs: list[int], batch: int, eps: float,
    scales: Tensor | None, index: Tensor | None, slot: Tensor | None, recompute: bool,
) -> list[Tensor]:  # fmt: skip
    """`chain_forward` as an operator: [output, *saved activations]; none are kept when `recompute`."""
    out, saved = ch.chain_forward(x, parameters, BlockSpec.from_ints(specs), batch, eps, scales, _rows(index, slot))
    return [out] if recompute else [out, *_flatten(saved)]


@chain.register_fake
def _(
    x: Tensor, parameters: list[Tensor], specs: list[int], batch: int, eps: float,
    scales: Tensor | None, index: Tensor | None, slot: Tensor | None, recompute: bool,
) -> list[Tensor]:  # fmt: skip
    blocks = BlockSpec.from_ints(specs)
    saved: list[Tensor] = []
    stream = x.dtype
    n = x.shape[0]
    for i, (spec, P) in enumerate(zip(blocks, ch.split_parameters(blocks, parameters), strict=True)):
        dtype, c_in, c_out, f = P[2].dtype, P[2].shape[1], P[4].shape[0], P[8].shape[0]
        window = spec.window or n // batch
        s = x.new_empty((n, c_in), dtype=stream)
        y = x.new_empty((n, c_in), dtype=dtype)
        mean, rstd = (x.new_empty(n, dtype=torch.float32) for _ in range(2))
        qkv = x.new_empty((n // window, window, 3, spec.heads, c_out // spec.heads), dtype=dtype)
        lse = x.new_empty(
            ch.lse_shape(n // window, window, spec.heads, c_out // spec.heads, spec.q_stride, dtype),
            dtype=torch.float32,
        )
        n //= spec.q_stride
        pooled = spec.projects and spec.q_stride > 1
        pool_index = x.new_empty((n, c_out) if pooled else (0,), dtype=torch.uint8)
        if i == len(blocks) - 1 and index is not None and slot is not None:
            n = n // slot.shape[1] * index.shape[1]
        if spec.projects:
            stream = dtype
        o, y2 = (x.new_empty((n, c_out), dtype=dtype) for _ in range(2))
        s2 = x.new_empty((n, c_out), dtype=stream)
        mean2, rstd2 = (x.new_empty(n, dtype=torch.float32) for _ in range(2))
        a, gelu_grad = (x.new_empty((n, f), dtype=dtype) for _ in range(2))
        saved += [s, y, mean, rstd, qkv, lse, o, pool_index, s2, y2, mean2, rstd2, a, gelu_grad]
    out = torch.empty_like(saved[-6])
    return [out] if recompute else [out, *saved[1:]]


@custom_op("hiera_optim::chain_backward")
def chain_backward(
    grad: Tensor, x: Tensor, parameters: list[Tensor], saved: list[Tensor], specs: list[int], batch: int, eps: float,
    scales: Tensor | None, index: Tensor | None, slot: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """[gradient of x, *gradients of the parameters]; an empty `saved` recomputes the forward."""
    writer = ch.Collected(parameters)
    grad_x = _run_backward(grad, x, parameters, saved, specs, batch, eps, scales, index, slot, writer)
    return [grad_x, *writer.gradients]


@chain_backward.register_fake
def _(
    grad: Tensor, x: Tensor, parameters: list[Tensor], saved: list[Tensor], specs: list[int], batch: int, eps: float,
    scales: Tensor | None, index: Tensor | None, slot: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x), *(torch.empty_like(p) for p in parameters)]


def _run_backward(
    grad: Tensor, x: Tensor, parameters: list[Tensor], saved: list[Tensor], specs: list[int], batch: int, eps: float,
    scales: Tensor | None, index: Tensor | None, slot: Tensor | None, writer: ch.GradientWriter,
) -> Tensor:  # fmt: skip
    blocks, rows = BlockSpec.from_ints(specs), _rows(index, slot)
    if saved:
        kept = _unflatten(x, saved)
    else:
        kept = ch.chain_forward(x, parameters, blocks, batch, eps, scales, rows)[1]
    tensors = (grad, x, *parameters, scales, index, slot)
    key = (tuple(specs), batch, *(None if t is None else (t.shape, t.dtype) for t in tensors))
    with batched_sums(key, grad.device):
        grad_x = ch.chain_backward(grad, parameters, kept, blocks, batch, scales, rows, writer)
    writer.finish()
    return grad_x if grad_x.dtype == x.dtype else grad_x.to(x.dtype)


def _chain_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, parameters, ctx.specs, ctx.batch, ctx.eps, scales, index, slot, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(parameters)
    ctx.save_for_backward(x, scales, index, slot, *parameters, *output[1:])


def _chain_gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, scales, index, slot, *rest = ctx.saved_tensors
    parameters, saved = rest[: ctx.count], rest[ctx.count :]
    grad = grads[0]
    nothing = (None,) * 7
    if grad is None:
        return None, [None] * ctx.count, *nothing
    statics = (ctx.specs, ctx.batch, ctx.eps, scales, index, slot)
    pointers = [p.data_ptr() for p in parameters] if _sink is not None else []
    # a frozen parameter has no buffer
    if _sink is None or any(p not in _sink.buffer_of for p in pointers):
        grad_x, *gradients = chain_backward(grad, x, parameters, saved, *statics)
        return grad_x, gradients, *nothing
    writer = ch.Direct([_sink.buffer_of[p] for p in pointers], _sink.accumulate)
    grad_x = _run_backward(grad, x, parameters, saved, *statics, writer)
    _sink.ready(pointers)
    return grad_x, [None] * ctx.count, *nothing


chain.register_autograd(_chain_gradient, setup_context=_chain_context)


# -- LayerNorm --------------------------------------------------------------------------------------------------


@custom_op("hiera_optim::norm")
def _norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    _, y, mean, rstd = layer_norm.add_layer_norm_forward(x, None, None, 1, weight, bias, eps, dtype)
    return y, mean, rstd


@_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    stat = x.new_empty(x.shape[0], dtype=torch.float32)
    return torch.empty_like(x, dtype=dtype), stat, torch.empty_like(stat)


@custom_op("hiera_optim::norm_backward")
def _norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, dw, db, _, _ = layer_norm.add_layer_norm_backward(
        grad.contiguous(), None, x, mean, rstd, weight, None, 1, with_column_sum=False
    )
    return grad_x, dw.to(weight.dtype, copy=True), db.to(weight.dtype, copy=True)


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1], output[2], inputs[1])


def _norm_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *_norm_backward(grad, *ctx.saved_tensors), None, None


_norm.register_autograd(_norm_gradient, setup_context=_norm_context)


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """LayerNorm of [N, C] rows with fp32 statistics; the result has `dtype`."""
    y: Tensor = _norm(x, weight, bias, eps, dtype)[0]
    return y


# -- Linear -----------------------------------------------------------------------------------------------------


@custom_op("hiera_optim::linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [N, K] @ weight [O, K].T + bias; its backward sums the bias gradient in fp32 and honours `direct_gradients`."""
    return torch.addmm(bias, x, weight.t())


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@custom_op("hiera_optim::linear_backward")
def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.mm(grad.t(), x), column_sum(grad).to(dtype, copy=True)


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), weight.new_empty(weight.shape[0], dtype=dtype)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    # addresses exist only where a sink does: a compiler traces this with tensors that have none
    pointers = [weight.data_ptr(), bias.data_ptr()] if _sink is not None else []
    if _sink is None or any(p not in _sink.buffer_of for p in pointers):
        return grad_x, *_linear_backward(grad, x, weight, bias.dtype)
    # a convolution's weight comes flattened
    targets = [_sink.buffer_of[pointers[0]].view_as(weight), _sink.buffer_of[pointers[1]]]
    writer = ch.Direct(targets, _sink.accumulate)
    writer.weight(0, grad, x)
    writer.vector(1, column_sum(grad))
    writer.finish()
    _sink.ready(pointers)
    return grad_x, None, None


linear.register_autograd(_linear_gradient, setup_context=_linear_context)


# -- mask units -------------------------------------------------------------------------------------------------


@custom_op("hiera_optim::gather_patches")
def gather_patches(x: Tensor, mask: Tensor, keep_idx: Tensor, geometry: list[int], dtype: torch.dtype) -> Tensor:
    """`patch_embed.gather_patches` as an operator; geometry: see `hiera_optim.tables.encode`."""
    return patch_embed.gather_patches(x, mask, keep_idx, tables.patch_tables(tuple(geometry), x.device), dtype)


@gather_patches.register_fake
def _(x: Tensor, mask: Tensor, keep_idx: Tensor, geometry: list[int], dtype: torch.dtype) -> Tensor:
    g = tables.decode(tuple(geometry))
    return x.new_empty((keep_idx.numel() * g.tokens, patch_embed.padded_columns(g.field)), dtype=dtype)


@custom_op("hiera_optim::add_position")
def add_position(x: Tensor, pos: Tensor, keep_idx: Tensor, slot: Tensor) -> Tensor:
    """x [B, L, E] + pos[keep_idx]; slot is keep_idx's inverse, for the gradient."""
    return units.add_position(x, pos, keep_idx)


@add_position.register_fake
def _(x: Tensor, pos: Tensor, keep_idx: Tensor, slot: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, pos.dtype))


@custom_op("hiera_optim::add_position_backward")
def _add_position_backward(grad: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    return units.add_position_backward(grad.contiguous(), slot).to(dtype)


@_add_position_backward.register_fake
def _(grad: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((slot.shape[1], grad.shape[-1]), dtype=dtype)


def _add_position_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, pos, _, slot = inputs
    ctx.save_for_backward(slot)
    ctx.dtypes = x.dtype, pos.dtype


def _add_position_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x_dtype, pos_dtype = ctx.dtypes
    return grad.to(x_dtype), _add_position_backward(grad, ctx.saved_tensors[0], pos_dtype), None, None


add_position.register_autograd(_add_position_gradient, setup_context=_add_position_context)


@custom_op("hiera_optim::assemble")
def assemble(latent: Tensor, token: Tensor, pos: Tensor, slot: Tensor) -> Tensor:
    """`units.assemble` as an operator."""
    return units.assemble(latent, token, pos, slot)


@assemble.register_fake
def _(latent: Tensor, token: Tensor, pos: Tensor, slot: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(latent.dtype, pos.dtype), token.dtype)
    return latent.new_empty((*slot.shape, latent.shape[-1]), dtype=dtype)


@custom_op("hiera_optim::assemble_backward")
def _assemble_backward(
    grad: Tensor, slot: Tensor, kept: int, channels: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    latent, token, pos = units.assemble_backward(grad.contiguous(), slot, kept, channels)
    return latent, token.to(dtype), pos.to(dtype)


@_assemble_backward.register_fake
def _(grad: Tensor, slot: Tensor, kept: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    B, M, E = grad.shape
    return grad.new_empty((B, kept, E)), grad.new_empty(channels, dtype=dtype), grad.new_empty((M, E), dtype=dtype)


def _assemble_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    latent, token, _, slot = inputs
    ctx.save_for_backward(slot)
    ctx.facts = latent.shape[1], token.numel(), token.dtype, latent.dtype


def _assemble_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    kept, channels, dtype, latent_dtype = ctx.facts
    latent, token, pos = _assemble_backward(grad, ctx.saved_tensors[0], kept, channels, dtype)
    return latent.to(latent_dtype), token, pos, None


assemble.register_autograd(_assemble_gradient, setup_context=_assemble_context)


# -- stochastic depth -------------------------------------------------------------------------------------------


@custom_op("hiera_optim::stochastic_depth", tags=(torch.Tag.nondeterministic_seeded,))
def stochastic_depth(like: Tensor, keep: list[float]) -> Tensor:
    """Fresh factors [2 * blocks, B] fp32, 0 or 1 / keep probability, from the device's generator.

    An operator, so that compiled code draws what eager code draws (inductor's own draws can repeat, pytorch#198333) and
    the probabilities are copied to the device once.

    Args:
        like: any tensor [B, ...] on the device.
        keep: the probability that a sample keeps a branch of each block.
    """
    probability = tables.keep_probabilities(tuple(keep), like.device)
    noise = torch.rand(len(probability), like.shape[0], device=like.device)
    return drop_path_scales(probability, noise)


@stochastic_depth.register_fake
def _(like: Tensor, keep: list[float]) -> Tensor:
    return like.new_empty((2 * len(keep), like.shape[0]), dtype=torch.float32)


# -- loss -------------------------------------------------------------------------------------------------------


@custom_op("hiera_optim::mae_loss")
def _mae_loss(pred: Tensor, x: Tensor, drop_idx: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return mae_loss.mae_loss_forward(pred, x, drop_idx, tables.label_tables(tuple(geometry), x.device))


@_mae_loss.register_fake
def _(pred: Tensor, x: Tensor, drop_idx: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    row = pred.new_empty(pred.shape[0], dtype=torch.float32)
    return pred.new_empty((), dtype=torch.float32), row, torch.empty_like(row)


@custom_op("hiera_optim::mae_loss_backward")
def _mae_loss_backward(
    grad: Tensor, pred: Tensor, x: Tensor, drop_idx: Tensor, mean: Tensor, rstd: Tensor, geometry: list[int]
) -> Tensor:
    addresses = tables.label_tables(tuple(geometry), x.device)
    return mae_loss.mae_loss_backward(grad, pred, x, drop_idx, mean, rstd, addresses)


@_mae_loss_backward.register_fake
def _(
    grad: Tensor, pred: Tensor, x: Tensor, drop_idx: Tensor, mean: Tensor, rstd: Tensor, geometry: list[int]
) -> Tensor:
    return torch.empty_like(pred)


def _mae_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pred, x, drop_idx, ctx.geometry = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(pred, x, drop_idx, output[1], output[2])


def _mae_loss_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return _mae_loss_backward(grad, *ctx.saved_tensors, ctx.geometry), None, None, None


_mae_loss.register_autograd(_mae_loss_gradient, setup_context=_mae_loss_context)


def loss(pred: Tensor, x: Tensor, drop_idx: Tensor, geometry: list[int]) -> Tensor:
    """Mean squared error of pred [R, F] against the normalised patches of x: 0-d fp32."""
    value: Tensor = _mae_loss(pred, x, drop_idx, geometry)[0]
    return value
