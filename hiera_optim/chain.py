"""A run of Hiera blocks, forward and backward written out over the fused kernels.

`torch.autograd` would record some thirty nodes a block; written out, a block is fourteen launches forward and
twenty-two backward, each bias gradient comes out of a kernel that reads the same data anyway, and residual additions
ride on the LayerNorm that follows them. GEMMs are cuBLAS through `torch.addmm`/`torch.mm`; everything else is in
`hiera_optim.ops`.

Legend: N rows (tokens), G windows (attention sequences), T tokens in a window, C channels, H heads, D head dim,
F = mlp_ratio * C. A window's tokens are contiguous rows, in Z-order when pooling follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from hiera_optim.ops import sdpa
from hiera_optim.ops._launch import capability
from hiera_optim.ops.attention import (
    attention_backward,
    attention_forward,
    attention_forward_lse,
    can_run,
    needs_lse,
)
from hiera_optim.ops.column_sum import column_sum
from hiera_optim.ops.layer_norm import add_layer_norm_backward, add_layer_norm_forward
from hiera_optim.ops.mlp import (
    bias_gelu_forward,
    gelu_backward,
    linear_gelu_backward,
    linear_gelu_forward,
    use_fused,
)
from hiera_optim.ops.pooling import max_pool_backward, max_pool_forward
from hiera_optim.ops.units import gather_units

PARAMETERS = 12
"""norm1 w b, qkv w b, proj w b, norm2 w b, fc1 w b, fc2 w b; then, where channels change, the residual proj w b."""
SAVED = 14
"""Activations a block keeps for its backward: see `Saved`."""


@dataclass(frozen=True)
class BlockSpec:
    """Static facts of one block; `to_ints` and `from_ints` carry it through a torch operator's schema."""

    window: int
    """Tokens in an attention sequence, before pooling; 0: all kept tokens of a sample."""
    heads: int
    q_stride: int
    projects: bool
    """The residual goes through a Linear (and max-pool) because channels change."""

    def to_ints(self) -> list[int]:
        return [self.window, self.heads, self.q_stride, int(self.projects)]

    @staticmethod
    def from_ints(values: list[int]) -> list[BlockSpec]:
        return [BlockSpec(w, h, q, bool(p)) for w, h, q, p in zip(*[iter(values)] * 4, strict=True)]


@dataclass
class Saved:
    """What a block's backward reads."""

    s: Tensor  # [N, C] residual stream entering the block
    y: Tensor  # [N, C] norm1(s)
    mean: Tensor
    rstd: Tensor
    qkv: Tensor  # [G, T, 3, H, D]
    lse: Tensor  # [G, H, T / q] fp32, empty where the backward kernel recomputes whole softmax rows
    o: Tensor  # [N', H * D] attention output of the rows that go on
    pool_index: Tensor  # [N / q, C] uint8, empty unless the residual is pooled
    s2: Tensor  # [N', C] residual stream after attention
    y2: Tensor  # [N', C] norm2(s2)
    mean2: Tensor
    rstd2: Tensor
    a: Tensor  # [N', F] gelu(fc1)
    gelu_grad: Tensor  # [N', F] gelu'(fc1)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


@dataclass
class Rows:
    """Which rows of a sample go on after the attention of the last block (decoder: the dropped units only)."""

    index: Tensor  # [B, D] int64 units that go on
    slot: Tensor  # [B, M] int32 their place, or -1

    def take(self, x: Tensor) -> Tensor:
        B, M = self.slot.shape
        return gather_units(x.view(B, M, -1), self.index).view(-1, x.shape[-1])

    def give_back(self, grad: Tensor) -> Tensor:
        B, D = self.index.shape
        return gather_units(grad.view(B, D, -1), self.slot).view(-1, grad.shape[-1])


class GradientWriter(Protocol):
    """Takes the gradients of a chain's parameters, by place in its list."""

    def weight(self, at: int, grad_out: Tensor, x: Tensor) -> None:
        """A Linear's weight: its gradient is grad_out.T @ x."""

    def vector(self, at: int, grad: Tensor) -> None:
        """A bias or a norm's weight, summed in fp32; its values may be there only when `finish` is called."""

    def finish(self) -> None:
        """All gradients have been given, and their values are there."""


class Collected:
    """Gradients as new tensors in the parameters' dtypes, for autograd."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._dtypes = [p.dtype for p in parameters]
        self._vectors: list[tuple[int, Tensor]] = []
        self.gradients: list[Tensor] = list(parameters)

    def weight(self, at: int, grad_out: Tensor, x: Tensor) -> None:
        self.gradients[at] = torch.mm(grad_out.t(), x)

    def vector(self, at: int, grad: Tensor) -> None:
        self._vectors.append((at, grad))

    def finish(self) -> None:
        """Copies the vectors: they share memory, and an operator may not return tensors that do."""
        for at, grad in self._vectors:
            self.gradients[at] = grad.to(self._dtypes[at], copy=True)


class Direct:
    """Gradients straight into persistent buffers: no accumulation kernel a parameter (some 400 in a Base model).

    Args:
        targets: [i] takes the gradient of the i-th parameter.
        accumulate: add to what is there instead of overwriting it.
    """

    def __init__(self, targets: list[Tensor], accumulate: bool) -> None:
        self._targets, self._accumulate = targets, accumulate
        self._vectors: list[tuple[int, Tensor]] = []

    def weight(self, at: int, grad_out: Tensor, x: Tensor) -> None:
        if self._accumulate:
            self._targets[at].addmm_(grad_out.t(), x)
        else:
            torch.mm(grad_out.t(), x, out=self._targets[at])

    def vector(self, at: int, grad: Tensor) -> None:
        self._vectors.append((at, grad))

    def finish(self) -> None:
        """Writes the vectors: one kernel for all of a chain's, eight a block otherwise."""
        targets, grads = [self._targets[at] for at, _ in self._vectors], [grad for _, grad in self._vectors]
        if self._accumulate:
            torch._foreach_add_(targets, grads)
        else:
            torch._foreach_copy_(targets, grads)


def _attention(qkv: Tensor, q_stride: int) -> tuple[Tensor, Tensor]:
    """Attention output [G, T / q, H * D] and the softmax statistics its backward wants, if any."""
    _, T, _, H, D = qkv.shape
    if can_run(T, H, D, q_stride, qkv.dtype):
        if needs_lse(T, H, D, q_stride, qkv.dtype):
            return attention_forward_lse(qkv, q_stride)
        return attention_forward(qkv, q_stride), qkv.new_empty(0, dtype=torch.float32)
    return sdpa.attention_forward(qkv, q_stride), qkv.new_empty(0, dtype=torch.float32)


def lse_shape(G: int, T: int, H: int, D: int, q_stride: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the softmax statistics that a block keeps."""
    if can_run(T, H, D, q_stride, dtype) and needs_lse(T, H, D, q_stride, dtype):
        return (G, H, T // q_stride)
    return (0,)


def _attention_backward(
    grad: Tensor, qkv: Tensor, q_stride: int, o: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor]:
    _, T, _, H, D = qkv.shape
    if can_run(T, H, D, q_stride, qkv.dtype):
        return attention_backward(grad, qkv, q_stride, o, lse if lse.numel() else None)
    return sdpa.attention_backward(grad, qkv, q_stride)


def _linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(x @ w.T + bias) and gelu' there."""
    if x.dtype != torch.float32 and use_fused(len(x), w.shape[1], w.shape[0], capability(x.device)):
        return linear_gelu_forward(x, w, bias)
    h = torch.addmm(bias, x, w.t())
    return bias_gelu_forward(h, None, out=h)


def _linear_gelu_backward(dy: Tensor, w: Tensor, gelu_grad: Tensor) -> tuple[Tensor, Tensor]:
    """(dy @ w) * gelu_grad and its column sums."""
    if dy.dtype != torch.float32 and use_fused(len(dy), w.shape[0], w.shape[1], capability(dy.device), backward=True):
        return linear_gelu_backward(dy, w, gelu_grad)
    return gelu_backward(torch.mm(dy, w), gelu_grad, in_place=True)


def block_forward(
    x: Tensor, delta: Tensor | None, spec: BlockSpec, P: list[Tensor], batch: int, eps: float,
    path_scale: Tensor | None, attn_scale: Tensor | None, rows: Rows | None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """One block. The residual stream entering it is x + path_scale * delta, the one leaving it s2 + scale * m.

    Args:
        x: [N, C] in the residual stream's dtype.
        delta: [N, C] output of the block before, not yet added; None at the start of a chain.
        spec, P: static facts and parameters (in the compute dtype; norms in any).
        batch: samples, for scales and for rows.
        eps: of the LayerNorms.
        path_scale, attn_scale: [B] fp32 stochastic-depth factors of delta and of this block's attention, or None.
        rows: the rows that go on after attention; None: all.

    Returns:
        (s2, m, saved): s2 [N', C'] residual stream, m [N', C'] to be added to it.
    """
    n1w, n1b, qkvw, qkvb, projw, projb, n2w, n2b, fc1w, fc1b, fc2w, fc2b = P[:PARAMETERS]
    dtype = qkvw.dtype
    s, y, mean, rstd = add_layer_norm_forward(x, delta, path_scale, len(x) // batch, n1w, n1b, eps, dtype)
    window = spec.window or len(x) // batch
    dim = qkvw.shape[0] // 3
    qkv = torch.addmm(qkvb, y, qkvw.t()).view(-1, window, 3, spec.heads, dim // spec.heads)
    attended, lse = _attention(qkv, spec.q_stride)
    o = attended.view(-1, dim)
    pool_index = y.new_empty(0, dtype=torch.uint8)
    base = s
    if spec.projects:
        base = torch.addmm(P[13], y, P[12].t())
        if spec.q_stride > 1:
            base, pool_index = max_pool_forward(base, spec.q_stride)
    if rows is not None:
        o, base = rows.take(o), rows.take(base)
    p = torch.addmm(projb, o, projw.t())
    s2, y2, mean2, rstd2 = add_layer_norm_forward(base, p, attn_scale, len(p) // batch, n2w, n2b, eps, dtype)
    a, gelu_grad = _linear_gelu(y2, fc1w, fc1b)
    m = torch.addmm(fc2b, a, fc2w.t())
    return s2, m, Saved(s, y, mean, rstd, qkv, lse, o, pool_index, s2, y2, mean2, rstd2, a, gelu_grad)


def block_backward(
    g: Tensor, gm: Tensor, gm_sum: Tensor, spec: BlockSpec, P: list[Tensor], v: Saved, batch: int,
    path_scale: Tensor | None, attn_scale: Tensor | None, rows: Rows | None, has_delta: bool,
    grads: GradientWriter, at: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of one block.

    Args:
        g: [N', C'] gradient of the residual stream that leaves the block.
        gm: [N', C'] the same times the scale of m, in the compute dtype; g itself when there is no scale.
        gm_sum: [C'] fp32 column sums of gm, fc2's bias gradient.
        grads: takes the parameters' gradients; `at` is the place of this block's first parameter.
        The rest as in `block_forward`; has_delta: delta was not None there.

    Returns:
        (g, gm, gm_sum) of the block before; gm_sum is None without one.
    """
    n1w, _, qkvw, _, projw, _, n2w, _, fc1w, _, fc2w, _ = P[:PARAMETERS]
    dtype = qkvw.dtype
    grads.weight(at + 10, gm, v.a)
    grads.vector(at + 11, gm_sum)
    dh, d_fc1b = _linear_gelu_backward(gm, fc2w, v.gelu_grad)
    grads.weight(at + 8, dh, v.y2)
    grads.vector(at + 9, d_fc1b)
    dy2 = torch.mm(dh, fc1w)
    del dh
    g1, d_n2w, d_n2b, d_projb, gp = add_layer_norm_backward(
        dy2, g, v.s2, v.mean2, v.rstd2, n2w, attn_scale, len(dy2) // batch, delta_dtype=dtype
    )
    gp = g1 if gp is None else gp
    assert d_projb is not None
    grads.vector(at + 6, d_n2w)
    grads.vector(at + 7, d_n2b)
    grads.weight(at + 4, gp, v.o)
    grads.vector(at + 5, d_projb)
    do = torch.mm(gp, projw)
    if rows is not None:
        do, g1 = rows.give_back(do), rows.give_back(g1)
    # where only some rows went on, the others' outputs were not kept: the backward kernel computes them again
    do = do.view(len(v.qkv), -1, do.shape[-1])
    o = v.o.view_as(do) if rows is None else None
    dqkv, d_qkvb = _attention_backward(do, v.qkv, spec.q_stride, o, v.lse)
    dqkv = dqkv.view(len(v.y), -1)
    grads.weight(at + 2, dqkv, v.y)
    grads.vector(at + 3, d_qkvb)
    dy = torch.mm(dqkv, qkvw)
    del dqkv
    residual: Tensor | None = g1
    if spec.projects:
        gr = g1 if g1.dtype == dtype else g1.to(dtype)
        grads.vector(at + 13, column_sum(gr))
        if spec.q_stride > 1:
            gr = max_pool_backward(gr, v.pool_index, spec.q_stride)
        grads.weight(at + 12, gr, v.y)
        dy.addmm_(gr, P[12])
        residual = None
    g0, d_n1w, d_n1b, gm0_sum, gm0 = add_layer_norm_backward(
        dy, residual, v.s, v.mean, v.rstd, n1w, path_scale if has_delta else None, len(dy) // batch,
        delta_dtype=dtype if has_delta else None, with_column_sum=has_delta,
    )  # fmt: skip
    grads.vector(at, d_n1w)
    grads.vector(at + 1, d_n1b)
    return g0, g0 if gm0 is None else gm0, gm0_sum


def parameter_counts(specs: list[BlockSpec]) -> list[int]:
    """Parameters of each block."""
    return [PARAMETERS + 2 * spec.projects for spec in specs]


def split_parameters(specs: list[BlockSpec], parameters: list[Tensor]) -> list[list[Tensor]]:
    """Cuts a chain's flat parameter list into its blocks'."""
    rest = iter(parameters)
    return [list(islice(rest, n)) for n in parameter_counts(specs)]


def chain_forward(
    x: Tensor, parameters: list[Tensor], specs: list[BlockSpec], batch: int, eps: float,
    scales: Tensor | None, rows: Rows | None,
) -> tuple[Tensor, list[Saved]]:  # fmt: skip
    """Blocks one after the other.

    Args:
        x: [N, C] residual stream.
        scales: [2 * blocks, B] fp32 stochastic-depth factors (attention, MLP of each block), or None.
        rows: applied in the last block.

    Returns:
        Residual stream after the last block, and what the backward reads.
    """
    saved = []
    delta: Tensor | None = None
    path_scale: Tensor | None = None
    blocks = split_parameters(specs, parameters)
    for i, (spec, P) in enumerate(zip(specs, blocks, strict=True)):
        attn_scale = scales[2 * i] if scales is not None else None
        last = rows if i == len(specs) - 1 else None
        x, delta, kept = block_forward(x, delta, spec, P, batch, eps, path_scale, attn_scale, last)
        path_scale = scales[2 * i + 1] if scales is not None else None
        saved.append(kept)
    assert delta is not None
    if path_scale is not None:
        delta = (delta.view(batch, -1) * path_scale[:, None].to(delta.dtype)).view_as(delta)
    return x + delta, saved


def chain_backward(
    g: Tensor, parameters: list[Tensor], saved: list[Saved], specs: list[BlockSpec], batch: int,
    scales: Tensor | None, rows: Rows | None, grads: GradientWriter,
) -> Tensor:  # fmt: skip
    """Gradient of x in `chain_forward`; the parameters' gradients go to `grads`.

    Frees each block's activations as it goes: `saved` is emptied.
    """
    blocks = split_parameters(specs, parameters)
    dtype = blocks[-1][2].dtype
    g = g.contiguous()
    gm = g if g.dtype == dtype else g.to(dtype)
    if scales is not None:
        gm = (gm.view(batch, -1) * scales[-1][:, None].to(dtype)).view_as(g)
    at = len(parameters)
    gm_sum: Tensor | None = column_sum(gm)
    for i in range(len(specs) - 1, -1, -1):
        at -= len(blocks[i])
        attn_scale = scales[2 * i] if scales is not None else None
        path_scale = scales[2 * i - 1] if scales is not None and i > 0 else None
        last = rows if i == len(specs) - 1 else None
        assert gm_sum is not None
        g, gm, gm_sum = block_backward(
            g, gm, gm_sum, specs[i], blocks[i], saved.pop(), batch, path_scale, attn_scale, last, i > 0, grads, at
        )
    return g
