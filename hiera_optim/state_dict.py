"""Weights between wrapped and plain models, and between input sizes: strip wrappers' prefixes, say key by key what
does not fit, and resample position embeddings on request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiera_optim.geometry import Geometry
from hiera_optim.masks import unwrap

_PREFIXES = ("module.", "_orig_mod.")
POSITION_EMBEDDINGS = ("pos_embed", "pos_embed_spatial", "pos_embed_temporal", "decoder_pos_embed")
"""Parameters whose shape the input size decides; a model has some of them."""


def clean_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A plain state dict: FAIR's "model_state" unpacked, "module." (DDP) and "_orig_mod." (compile) removed.

    Raises ValueError if two keys become one.
    """
    inner = state_dict.get("model_state", state_dict)
    cleaned: dict[str, Tensor] = {}
    for key, value in inner.items():
        name = key
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name in cleaned:
            raise ValueError(f"state dict has {name!r} twice, with and without a wrapper's prefix")
        cleaned[name] = value
    return cleaned


def state_dict_mismatches(model: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """One line a key that is missing, unexpected or of another shape; empty if the dict loads strictly."""
    own = unwrap(model).state_dict()
    given = clean_state_dict(state_dict)
    lines = [f"{key}: missing" for key in own if key not in given]
    lines += [f"{key}: not in the model" for key in given if key not in own]
    for key, value in own.items():
        if key in given and given[key].shape != value.shape:
            lines.append(f"{key}: the model has {list(value.shape)}, the checkpoint {list(given[key].shape)}")
    return lines


def only_input_size_differs(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """True if both have the same names, and shapes that differ in nothing but the length of position embeddings.

    A name may have a prefix that ends in a dot, as optimizer state of a parameter has.
    """
    return one.keys() == other.keys() and all(
        value.shape == other[name].shape
        or (name.rsplit(".", 1)[-1] in POSITION_EMBEDDINGS and value.shape[2:] == other[name].shape[2:])
        for name, value in one.items()
    )


def load_weights(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load FAIR's or our weights strictly, from under any wrapper, into a plain or wrapped model.

    Position embeddings of another input size are not resampled unasked: see `interpolate_position_embeddings`.
    Raises ValueError that names every key that does not fit; the model is then unchanged.
    """
    weights, own = clean_state_dict(state_dict), unwrap(model)
    lines = state_dict_mismatches(own, weights)
    if lines:
        remedy = ""
        if only_input_size_differs(weights, own.state_dict()):
            remedy = "; interpolate_position_embeddings(state_dict, model) makes weights of another input size fit"
        raise ValueError("checkpoint does not fit the model: " + "; ".join(lines) + remedy)
    own.load_state_dict(weights, strict=True)


def interpolate_position_embeddings(
    state_dict: Mapping[str, Any], model: nn.Module, *, input_size: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Weights of another input size, with their position embeddings resampled to the model's.

    Linear along a signal's length and along time, bicubic (no antialiasing) in the plane, token centres kept; in
    float32 or wider, returned in the embedding's own dtype. Embeddings that fit are the very same tensors, as all
    other weights are; nothing given is changed.

    Args:
        state_dict: FAIR's or our weights, from under any wrapper.
        model: a Hiera or MaskedAutoencoderHiera, plain, optimised or wrapped, of the wanted size; it is only read.
        input_size: what the weights were trained on, without channels: [length], [height, width] or [frames, height,
            width]. None: as the model's where the number of tokens agrees, else a square.

    Returns:
        A plain state dict (`clean_state_dict`) for `load_weights`, or `load_state_dict` of a classifier.

    Raises:
        ValueError: the weights are of another kind of model, or their input size has to be given; one line.
    """
    geom = Geometry.from_model(unwrap(model))
    weights, own = clean_state_dict(state_dict), unwrap(model).state_dict()
    wanted = [name for name in POSITION_EMBEDDINGS if name in own]
    for name in wanted:
        if name not in weights:
            raise ValueError(f"{name}, which the model has, is not in the checkpoint: it is of another kind of model")
        if weights[name].dim() != 3 or weights[name].shape[2] != own[name].shape[2]:
            have, need = weights[name].shape[-1], own[name].shape[2]
            raise ValueError(f"{name} has {have} channels in the checkpoint, {need} in the model: another model")
    tokens = _tokens_shape(weights, geom, input_size)
    pooled = tuple(n // s**geom.q_pool for n, s in zip(tokens, geom.q_stride, strict=True))
    grids = {
        "pos_embed": (tokens, geom.tokens_shape),
        "pos_embed_spatial": (tokens[1:], geom.tokens_shape[1:]),
        "pos_embed_temporal": (tokens[:1], geom.tokens_shape[:1]),
        "decoder_pos_embed": (pooled, geom.pred_shape),
    }
    for name in wanted:
        before, after = grids[name]
        if weights[name].shape[1] != math.prod(before):
            size = tuple(n * s for n, s in zip(tokens, geom.patch_stride, strict=True))
            raise ValueError(
                f"input_size {size} gives {name} {math.prod(before)} tokens, but the checkpoint has "
                f"{weights[name].shape[1]}: it is of another input_size, patch_stride or q_pool"
            )
        weights[name] = _resample(weights[name], before, after)
    return weights


def _tokens_shape(weights: Mapping[str, Tensor], geom: Geometry, input_size: Sequence[int] | None) -> tuple[int, ...]:
    """The grid of tokens that the weights were trained on."""
    if input_size is not None:
        if len(input_size) != geom.spatial_dims or any(n != int(n) for n in input_size):
            raise ValueError(f"input_size must be whole numbers for {geom.spatial_dims} dimensions, not {input_size}")
        return tuple(int(n) // s for n, s in zip(input_size, geom.patch_stride, strict=True))
    separate = "pos_embed" not in weights
    count = weights["pos_embed_spatial" if separate else "pos_embed"].shape[1]
    frames = (weights["pos_embed_temporal"].shape[1],) if separate else ()
    own = geom.tokens_shape[len(frames) :]
    if count == math.prod(own):
        return (*frames, *own)
    if len(own) == 1:
        return (count,)
    if len(own) == 3:
        raise ValueError(f"the checkpoint's pos_embed has {count} tokens of time and space: give its input_size")
    side = math.isqrt(count)
    if side * side != count:
        raise ValueError(f"the checkpoint's {count} tokens of a picture are not square: give its input_size")
    return (*frames, side, side)


def _resample(embedding: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """[1, prod(before), C] to [1, prod(after), C]."""
    if before == after:
        return embedding
    channels = embedding.shape[2]
    grid = embedding.detach().to(torch.promote_types(embedding.dtype, torch.float32)).reshape(*before, channels)
    if len(before) != 2:  # along the length, or time
        lines = F.interpolate(grid.flatten(1).t().unsqueeze(0), size=after[0], mode="linear")
        grid = lines.squeeze(0).t().reshape(after[0], *before[1:], channels)
    if len(before) != 1:  # in the plane
        planes = F.interpolate(grid.movedim(-1, -3).reshape(-1, 1, *before[-2:]), size=after[-2:], mode="bicubic")
        grid = planes.reshape(*after[:-2], channels, *after[-2:]).movedim(-3, -1)
    return grid.reshape(1, math.prod(after), channels).to(embedding.dtype)
