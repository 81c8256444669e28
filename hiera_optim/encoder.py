"""The encoder in window-major Z-order, in plain PyTorch: one small function a stage, explicit tensors.

Tokens are [B, L, T, C]: kept mask units in ascending order, T tokens of a unit in Z-order. This path is what
a CPU runs and the reference of every kernel. Shape letters: see geometry.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hiera_optim.attention import packed_attention, pool_max, take_rows
from hiera_optim.geometry import FairModel, Geometry, grid_to_unit, grid_to_units, unit_to_grid, units_to_grid


@dataclass(frozen=True)
class FastState:
    """What optimize() leaves on a model: its geometry and the attention backend of each block."""

    geom: Geometry
    encoder_backends: tuple[str | None, ...]
    decoder_backends: tuple[str | None, ...]
    own_random_mask: bool = True
    """False where get_random_mask is overridden, so that its result has to be counted."""


def state_of(model: FairModel) -> FastState:
    """The model's FastState; of a plain FAIR model one with PyTorch's choice of backends."""
    state = getattr(model, "_hiera_state", None)
    if state is None:
        decoder = len(getattr(model, "decoder_blocks", ()))
        state = FastState(Geometry.from_model(model), (None,) * len(model.blocks), (None,) * decoder)
    assert isinstance(state, FastState)
    return state


def check_input(geom: Geometry, x: Tensor) -> None:
    """Raise TypeError or ValueError unless x is floating point [B >= 1, in_chans, *input_size]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"input must be a floating-point tensor, not {found}")
    if tuple(x.shape[1:]) != (geom.in_chans, *geom.input_size) or x.shape[0] < 1:
        want = ", ".join(map(str, ("B", geom.in_chans, *geom.input_size)))
        raise ValueError(f"input must be [{want}], not {list(x.shape)}")


def batch_index(x: Tensor) -> Tensor:
    """int64 [B, 1] for advanced indexing of the batch dimension."""
    return torch.arange(x.shape[0], device=x.device).unsqueeze(1)


def unit_coordinates(unit: Tensor, geom: Geometry) -> list[Tensor]:
    """Coordinates, one int64 tensor a spatial dimension, of mask unit numbers."""
    coordinates = []
    for count in reversed(geom.mask_units_shape):
        coordinates.append(unit % count)
        unit = unit // count
    return coordinates[::-1]


def _conv(model: FairModel) -> Callable[..., Tensor]:
    return {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[model.patch_embed.proj.weight.dim() - 2]


def position_units(model: FairModel, geom: Geometry) -> Tensor:
    """The position embedding in window-major order: [M, T0, C]."""
    grid = model.get_pos_embed().reshape(*geom.tokens_shape, -1)
    return grid_to_units(grid, 0, geom.mask_units_shape, geom.q_stride, geom.levels)


def kept_windows(geom: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor) -> Tensor:
    """Pixels of the kept mask units with the halo their patches overlap: [B, L, in_chans, *window].

    window = unit_pixels - patch_stride + patch_kernel in each dimension. Pixels of masked neighbours and
    outside of the input are zero, as in FAIR's masked convolution.
    """
    B, dims = x.shape[0], geom.spatial_dims
    split: list[int] = []
    for count, pixels in zip(geom.mask_units_shape, geom.unit_pixels, strict=True):
        split += [count, pixels]
    visible = mask.view(B, 1, *[n for count in geom.mask_units_shape for n in (count, 1)])
    x = (x.reshape(B, geom.in_chans, *split) * visible).reshape(x.shape)
    halo: list[int] = []
    for kernel, stride, padding in zip(
        reversed(geom.patch_kernel), reversed(geom.patch_stride), reversed(geom.patch_padding), strict=True
    ):
        halo += [padding, max(0, kernel - stride - padding)]
    x = F.pad(x, halo)
    for d in range(dims):
        pixels = geom.unit_pixels[d]
        x = x.unfold(2 + d, pixels - geom.patch_stride[d] + geom.patch_kernel[d], pixels)
    x = x.movedim(1, 1 + dims)
    return x[(batch_index(x), *unit_coordinates(keep_idx, geom))]


def embed_kept(model: FairModel, geom: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor) -> Tensor:
    """Patch and position embedding of the kept mask units only.

    x [B, in_chans, *input_size], mask bool [B, M], keep_idx int64 [B, L]; returns [B, L, T0, C].
    """
    proj = model.patch_embed.proj
    B, L = keep_idx.shape
    windows = kept_windows(geom, x, mask, keep_idx).flatten(0, 1)
    tokens = _conv(model)(windows, proj.weight, proj.bias, stride=geom.patch_stride)
    tokens = grid_to_unit(tokens.movedim(1, -1), 1, geom.q_stride, geom.levels)
    position = position_units(model, geom).index_select(0, keep_idx.flatten())
    return torch.unflatten(tokens + position, 0, (B, L))


def embed_all(model: FairModel, geom: Geometry, x: Tensor) -> Tensor:
    """Patch and position embedding of every mask unit: [B, M, T0, C]."""
    tokens = model.patch_embed.proj(x).movedim(1, -1)
    tokens = grid_to_units(tokens, 1, geom.mask_units_shape, geom.q_stride, geom.levels)
    return tokens + position_units(model, geom)


def keep_probabilities(model: FairModel) -> list[float]:
    """The probability that a sample keeps the branches of each encoder block."""
    return [1.0 - float(getattr(b.drop_path, "drop_prob", 0.0) or 0.0) for b in model.blocks]


def branch_probabilities(keep: Sequence[float], device: torch.device) -> Tensor:
    """The same for attention and MLP of each block: fp32 [2 * blocks, 1] on the device."""
    return torch.tensor(keep, dtype=torch.float32, device=device).repeat_interleave(2).unsqueeze(1)


def drop_path_scales(keep_probability: Tensor, noise: Tensor) -> Tensor:
    """Stochastic-depth factors, 0 or 1 / keep probability: fp32 [2 * blocks, B], attention and MLP of each block.

    keep_probability: see `branch_probabilities`; noise: [2 * blocks, B] uniform in [0, 1).
    """
    return (noise < keep_probability).float() / keep_probability


def drop_path(module: nn.Module, branch: Tensor, scale: Tensor | None = None) -> Tensor:
    """Stochastic depth of a residual branch [B, ...] by the factors scale [B], else drawn once a sample as FAIR does.

    To draw, the module is applied to ones of FAIR's rank, so the draw and the scale are its own.
    """
    if scale is not None:
        return branch * scale.to(branch.dtype).view(-1, *[1] * (branch.dim() - 1))
    if isinstance(module, nn.Identity) or not module.training:
        return branch
    drawn: Tensor = module(branch.new_ones(branch.shape[0], 1, 1))
    return branch * drawn.view(-1, *[1] * (branch.dim() - 1))


def block_forward(
    block: FairModel, x: Tensor, backend: str | None, rows: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """One HieraBlock on x [B, L, T, C]: [B, L, T / q_stride, C'].

    rows: None, or int64 [B, R] into L * T of a global-attention block without pooling: the only tokens whose
    output is needed; then the result is [B, 1, R, C]. scales: [2, B] factors of stochastic depth (attention, MLP); None
    to draw them.
    """
    attention_scale, mlp_scale = scales if scales is not None else (None, None)
    attn = block.attn
    B, L, T, _ = x.shape
    pool = attn.q_stride
    normed = block.norm1(x)
    groups, tokens = (B * L, T) if attn.use_mask_unit_attn else (B, L * T)
    qkv = attn.qkv(normed).view(groups, tokens, 3, attn.heads, attn.head_dim)
    attended = packed_attention(qkv, pool, backend, rows)
    if block.dim != block.dim_out:
        x = pool_max(block.proj(normed), 2, pool)
    if rows is not None:
        x = take_rows(x.flatten(1, 2), rows).unsqueeze(1)
    x = x + drop_path(block.drop_path, attn.proj(attended).view(B, *x.shape[1:3], attn.dim_out), attention_scale)
    return x + drop_path(block.drop_path, block.mlp(block.norm2(x)), mlp_scale)


def run_block(
    block: FairModel,
    x: Tensor,
    backend: str | None,
    rows: Tensor | None = None,
    recompute: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """`block_forward`, with its activations recomputed in backward if `recompute`."""
    if recompute and torch.is_grad_enabled():
        result: Tensor = checkpoint(block_forward, block, x, backend, rows, scales, use_reentrant=False)
        return result
    return block_forward(block, x, backend, rows, scales)


def run_blocks(
    blocks: Iterable[FairModel],
    x: Tensor,
    backends: Sequence[str | None],
    taps: Sequence[int],
    recomputed: frozenset[int] = frozenset(),
    scales: Tensor | None = None,
) -> list[Tensor]:
    """Run encoder blocks on x [B, L, T0, C] and return the outputs of the blocks numbered in `taps`.

    recomputed: numbers of the blocks whose activations are recomputed in backward. scales: see `drop_path_scales`; None
    to draw stochastic depth anew.
    """
    tapped = []
    for i, block in enumerate(blocks):
        own = scales[2 * i : 2 * i + 2] if scales is not None else None
        x = run_block(block, x, backends[i], recompute=i in recomputed, scales=own)
        if i in taps:
            tapped.append(x)
    return tapped


def recomputed_blocks(model: FairModel) -> frozenset[int]:
    """Encoder blocks to recompute in backward: enable_stage_checkpointing's marks, in training only."""
    if not model.training:
        return frozenset()
    if getattr(model, "_grad_checkpointing", False):  # a switch that in-tree copies of FAIR's code carry
        return frozenset(range(len(model.blocks)))
    marks: frozenset[int] = getattr(model, "_hiera_checkpoint", frozenset())
    return marks


def fuse(model: FairModel, geom: Geometry, features: Sequence[Tensor]) -> Tensor:
    """Multi-scale fusion of the stage outputs [B, L, T_k, C_k] to [B, L, S, C].

    A fusion head is a convolution whose kernel equals its stride: in Z-order a Linear over (group, C_k).
    """
    fused: Tensor | float = 0.0
    for head, feature in zip(model.multi_scale_fusion_heads, features, strict=True):
        if isinstance(head, nn.Identity):
            fused = fused + feature
            continue
        kernel = head.weight.shape[2:]
        levels = 0 if math.prod(kernel) == 1 else round(math.log(math.prod(kernel), geom.flat_q))
        weight = grid_to_unit(head.weight, 2, geom.q_stride, levels).transpose(1, 2).flatten(1)
        B, L, T, C = feature.shape
        group = weight.shape[1] // C
        fused = fused + F.linear(feature.reshape(B, L, T // group, group * C), weight, head.bias)
    assert isinstance(fused, Tensor)
    return fused


def encode(
    model: FairModel, geom: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor, scales: Tensor | None = None
) -> Tensor:
    """Encoder of the MAE with fusion and final norm: [B, L, S, C], S tokens in Z-order; scales: see `run_blocks`."""
    tokens = embed_kept(model, geom, x.to(embed_dtype(model, x)), mask, keep_idx)
    taps = (*geom.stage_ends[: geom.q_pool], geom.stage_ends[-1])
    backends, recomputed = state_of(model).encoder_backends, recomputed_blocks(model)
    features = run_blocks(model.blocks, tokens, backends, taps, recomputed, scales)
    latent: Tensor = model.encoder_norm(fuse(model, geom, features))
    return latent


def embed_dtype(model: FairModel, x: Tensor) -> torch.dtype:
    """The dtype to embed x in: the weights', so that a float32 input can feed a bfloat16 model."""
    weight: Tensor = model.patch_embed.proj.weight
    if x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return weight.dtype


def latent_to_fair(latent: Tensor, geom: Geometry) -> Tensor:
    """[B, L, S, C] to FAIR's [B, L, *final_unit_shape, C]."""
    return unit_to_grid(latent, 2, geom.q_stride, geom.final_levels)


def latent_from_fair(latent: Tensor, geom: Geometry) -> Tensor:
    """FAIR's [B, L, *final_unit_shape, C] to [B, L, S, C]."""
    return grid_to_unit(latent, 2, geom.q_stride, geom.final_levels)


def unrolled_order(x: Tensor, levels: int, flat_q: int) -> Tensor:
    """[B, L, T, C] in Z-order to FAIR's unrolled order [B, T * L, C]: first level slowest, unit fastest."""
    B, L, _, C = x.shape
    x = x.reshape(B, L, *[flat_q] * levels, C)
    order = [0, *range(1 + levels, 1, -1), 1, 2 + levels]
    return x.permute(order).reshape(B, -1, C)


def classify(
    model: FairModel, geom: Geometry, x: Tensor, mask: Tensor | None, keep_idx: Tensor | None, features: bool
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """FAIR's Hiera.forward: class scores, or with a mask the last tokens in FAIR's order [B, N, C].

    features: also return the output of every stage, [B, *grid, C], or [B, L, *unit, C] with a mask.
    """
    x = x.to(embed_dtype(model, x))
    if mask is None or keep_idx is None:
        tokens = embed_all(model, geom, x)
    else:
        tokens = embed_kept(model, geom, x, mask, keep_idx)
    taps = geom.stage_ends if features else geom.stage_ends[-1:]
    outputs = run_blocks(model.blocks, tokens, state_of(model).encoder_backends, taps, recomputed_blocks(model))
    last = outputs[-1]
    if mask is None:
        result: Tensor = model.head(model.norm(last.flatten(1, 2).mean(dim=1)))
    else:
        result = unrolled_order(last, geom.final_levels, geom.flat_q)
    if not features:
        return result
    intermediates = []
    for stage, output in enumerate(outputs):
        # FAIR's Reroll undoes the level consumed by the pooling after a stage only from the next stage on.
        levels = geom.stage_levels(stage)
        if mask is None:
            intermediates.append(units_to_grid(output, 1, geom.mask_units_shape, geom.q_stride, levels))
        else:
            intermediates.append(unit_to_grid(output, 2, geom.q_stride, levels))
    return result, intermediates
