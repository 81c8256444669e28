"""Sizes that follow from the model section, in plain Python: tokens, mask units, parameters.

The training library computes the same from FAIR's model itself; here nothing may import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.config.schema import ModelSection


def size_divisors(model: ModelSection) -> tuple[int, ...]:
    """What each dimension of input_size must divide by: patch_stride x q_stride^(stages - 1)."""
    pools = len(model.stages) - 1
    return tuple(p * q**pools for p, q in zip(model.patch_stride, model.q_stride, strict=True))


def token_shape(model: ModelSection) -> tuple[int, ...]:
    """Tokens along each dimension after the patch embedding."""
    return tuple(i // s for i, s in zip(model.input_size, model.patch_stride, strict=True))


def mask_unit_count(model: ModelSection) -> int:
    """Mask units in a sample (M)."""
    return math.prod(t // m for t, m in zip(token_shape(model), model.mask_unit_size, strict=True))


def kept_mask_units(units: int, mask_ratio: float) -> int:
    """Mask units that stay visible (L), rounded exactly as FAIR's get_random_mask does."""
    return int(units * (1 - mask_ratio))


def parameter_count(model: ModelSection) -> int:
    """Parameters of FAIR's MaskedAutoencoderHiera of this section."""
    tokens = token_shape(model)
    pooled = [q**model.q_pool for q in model.q_stride]
    patch_values = model.in_chans * math.prod(model.patch_kernel)
    count: int = (patch_values + 1) * model.embed_dim
    if model.sep_pos_embed:
        count += (tokens[0] + math.prod(tokens[1:])) * model.embed_dim
    else:
        count += math.prod(tokens) * model.embed_dim

    encoder_out: int = model.embed_dim * 2 ** (len(model.stages) - 1)
    for dim, dim_out in _encoder_blocks(model):
        count += _block(dim, dim_out, model.mlp_ratio)
    count += 2 * encoder_out
    # Fusion heads: a convolution from each pooled stage to the last stage's shape.
    for stage in range(model.q_pool):
        kernel = math.prod(q ** (model.q_pool - stage) for q in model.q_stride)
        count += (model.embed_dim * 2**stage * kernel + 1) * encoder_out

    width = model.decoder_embed_dim
    prediction = (model.patch_stride[-1] * pooled[-1]) ** min(2, len(model.q_stride)) * model.in_chans
    count += (encoder_out + 1) * width + width  # decoder_embed, mask_token
    count += math.prod(t // p for t, p in zip(tokens, pooled, strict=True)) * width
    count += model.decoder_depth * _block(width, width, model.mlp_ratio)
    count += 2 * width + (width + 1) * prediction
    return count


def _encoder_blocks(model: ModelSection) -> Iterator[tuple[int, int]]:
    """(channels in, channels out) of every encoder block; the first block of a later stage doubles them."""
    dim = model.embed_dim
    for stage, depth in enumerate(model.stages):
        for block in range(depth):
            out = dim * 2 if stage > 0 and block == 0 else dim
            yield dim, out
            dim = out


def _block(dim: int, out: int, mlp_ratio: float) -> int:
    hidden = int(out * mlp_ratio)
    norms = 2 * dim + 2 * out
    attention = (dim + 1) * 3 * out + (out + 1) * out
    mlp = (out + 1) * hidden + (hidden + 1) * out
    return norms + attention + mlp + ((dim + 1) * out if dim != out else 0)
