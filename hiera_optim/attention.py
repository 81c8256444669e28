"""Attention of Hiera: always 4-D, never with attn_mask, in chunks that every backend can run.

FAIR sends windows as a fifth dimension, for which PyTorch has only the math kernel. Here windows are part of
the batch dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

BACKEND_NAMES: tuple[str, ...] = tuple(_BACKENDS)
"""Names that `sdpa_backend` takes; the first three are CUDA kernels."""

BackendHint = str | None | Callable[[int, nn.Module], str | None]

# cuDNN's backward has given NaN on Hopper for sequences of 64 modulo 128 (pytorch#196678), exactly an 8x8
# mask unit, so it runs only when it is asked for by name.
_SAFE_ON_CUDA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# The CUDA kernels put the batch in a grid dimension of at most 65535 blocks (pytorch#146704, #142228);
# flash's backward indexes with 32 bits (batch * heads * padded length * head dim).
MAX_GROUPS = 65535
MAX_ELEMENTS = 1 << 31


def check_backend(name: object) -> str | None:
    """Return `name` if it is None or one of BACKEND_NAMES, else raise ValueError."""
    if name is None or (isinstance(name, str) and name in _BACKENDS):
        return name
    raise ValueError(f"unknown sdpa_backend {name!r}: use None, 'auto', {', '.join(map(repr, BACKEND_NAMES))}")


def _backend_context(x: Tensor, backend: str | None) -> contextlib.AbstractContextManager[Any]:
    """The kernel choice around one attention call; outside CUDA only flash and math are distinct kernels."""
    if backend is None:
        return sdpa_kernel(_SAFE_ON_CUDA) if x.is_cuda else contextlib.nullcontext()
    if x.is_cuda or backend in ("flash", "math"):
        return sdpa_kernel([_BACKENDS[backend]])
    return contextlib.nullcontext()


def groups_per_call(heads: int, tokens: int, head_dim: int) -> int:
    """Most groups that one attention call may hold on every backend."""
    padded = -(-tokens // 128) * 128
    return max(1, min(MAX_GROUPS, (MAX_ELEMENTS - 1) // (heads * padded * max(head_dim, 32))))


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q [G, H, Tq, D], k and v [G, H, T, D]; returns [G, H, Tq, D].

    backend: None (flash, else memory-efficient, else math; cuDNN never) or one of BACKEND_NAMES, which then
    is the only kernel allowed on CUDA.
    """
    groups = q.shape[0]
    limit = groups_per_call(q.shape[1], max(q.shape[2], k.shape[2]), q.shape[3])
    with _backend_context(q, backend):
        if groups <= limit:
            return F.scaled_dot_product_attention(q, k, v)
        parts = [
            F.scaled_dot_product_attention(q[i : i + limit], k[i : i + limit], v[i : i + limit])
            for i in range(0, groups, limit)
        ]
    return torch.cat(parts)


def pool_max(x: Tensor, dim: int, stride: int) -> Tensor:
    """Maximum over groups of `stride` neighbours of `dim`; a tie sends its gradient to one, as FAIR's."""
    if stride == 1:
        return x
    return torch.unflatten(x, dim, (-1, stride)).max(dim=dim + 1).values


def packed_attention(qkv: Tensor, pool: int, backend: str | None = None, q_rows: Tensor | None = None) -> Tensor:
    """Attention inside each group, straight from the packed projection.

    qkv [G, T, 3, H, D], tokens in Z-order; queries are max-pooled over the innermost `pool` tokens. q_rows:
    None, or int64 [G, R], the only (unpooled) tokens that need an output. Returns [G, T // pool or R, H * D].
    """
    q, k, v = qkv.unbind(2)
    if q_rows is not None:
        q = take_rows(q.flatten(2), q_rows).view(*q_rows.shape, *q.shape[2:])
    q = pool_max(q, 1, pool)
    out = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend)
    return out.transpose(1, 2).flatten(2)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, N, C] at rows int64 [B, R]: [B, R, C]."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[2]))


class MaskUnitAttentionFast(nn.Module):
    """FAIR's MaskUnitAttention with 4-D attention: same parameters, same token order, same result.

    Takes and returns FAIR's unrolled order [B, N, C], in which the windows are the fastest dimension. Raises
    ValueError for an unknown sdpa_backend.
    """

    _hiera_ours = True

    def __init__(
        self,
        dim: int,
        dim_out: int,
        heads: int,
        q_stride: int = 1,
        window_size: int = 0,
        use_mask_unit_attn: bool = False,
        sdpa_backend: str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.dim_out = dim_out
        self.heads = heads
        self.q_stride = q_stride
        self.head_dim = dim_out // heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim_out)
        self.proj = nn.Linear(dim_out, dim_out)
        self.window_size = window_size
        self.use_mask_unit_attn = use_mask_unit_attn
        self.sdpa_backend = check_backend(sdpa_backend)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, dim] to [B, N / q_stride, dim_out]."""
        B, N, _ = x.shape
        windows = N // (self.q_stride * self.window_size) if self.use_mask_unit_attn else 1
        T, H, D = N // windows, self.heads, self.head_dim
        qkv = self.qkv(x).view(B, T, windows, 3, H, D).permute(3, 0, 2, 4, 1, 5)
        q, k, v = qkv.reshape(3, B * windows, H, T, D).unbind(0)
        if self.q_stride > 1:
            # FAIR's order has the pooled offset as the slowest part of a window.
            q = q.view(B * windows, H, self.q_stride, T // self.q_stride, D).max(dim=2).values
        out = sdpa(q, k, v, self.sdpa_backend)
        out = out.view(B, windows, H, -1, D).permute(0, 3, 1, 2, 4).reshape(B, -1, self.dim_out)
        return self.proj(out)  # type: ignore[no-any-return]
