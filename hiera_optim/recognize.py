"""Recognise FAIR's Hiera by class names and structure, whatever module it was imported from.

PyPI's `hiera`, an in-tree copy such as `models.hiera`, and subclasses of either are all recognised; nothing
is imported. A class called Hiera with other parts (timm's, SAM 2's) is not FAIR's and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hiera_optim.geometry import FairModel

_MODEL_PARTS = (
    "blocks",
    "patch_embed",
    "unroll",
    "reroll",
    "stage_ends",
    "q_pool",
    "q_stride",
    "mask_unit_size",
    "mask_spatial_shape",
    "tokens_spatial_shape",
    "get_pos_embed",
)
_MAE_PARTS = (
    "multi_scale_fusion_heads",
    "encoder_norm",
    "decoder_embed",
    "mask_token",
    "decoder_pos_embed",
    "decoder_blocks",
    "decoder_norm",
    "decoder_pred",
    "mask_unit_spatial_shape_final",
    "pred_stride",
)
_BLOCK_PARTS = ("norm1", "attn", "norm2", "mlp", "drop_path", "dim", "dim_out")
_ATTENTION_PARTS = ("qkv", "proj", "heads", "head_dim", "q_stride", "window_size", "use_mask_unit_attn")


def fair_class(cls: type, name: str) -> type | None:
    """FAIR's own class called `name` among the bases of cls: the last of that name, not a subclass of it."""
    found = [base for base in cls.__mro__ if base.__name__ == name]
    return found[-1] if found else None


def _missing(module: object, parts: Iterable[str]) -> list[str]:
    return [part for part in parts if not hasattr(module, part)]


def why_not_hiera(model: object) -> str | None:
    """None if model is FAIR's Hiera or MaskedAutoencoderHiera, else why it is not, as an error message."""
    cls = type(model)
    if not isinstance(model, nn.Module):
        return f"{cls.__name__} is not a torch.nn.Module"
    inner = model.__dict__.get("_modules", {})
    if fair_class(cls, "Hiera") is None:
        if "_orig_mod" in inner or "module" in inner:
            return f"{cls.__name__} wraps a model: pass the model itself, before torch.compile or DDP"
        return f"{cls.__name__} is not FAIR's Hiera: no class named Hiera among its bases"
    missing = _missing(model, _MODEL_PARTS)
    if not missing and is_mae_class(cls):
        missing = _missing(model, _MAE_PARTS)
    if not missing:
        for block in all_blocks(model):
            missing += _missing(block, _BLOCK_PARTS)
            if not missing:
                missing += _missing(block.attn, _ATTENTION_PARTS)
    if missing:
        return f"{cls.__name__} is not FAIR's Hiera: it has no {missing[0]}"
    return None


def check_hiera(model: object) -> None:
    """Raise TypeError, one line, unless model is FAIR's Hiera or MaskedAutoencoderHiera."""
    reason = why_not_hiera(model)
    if reason is not None:
        raise TypeError(reason)


def is_mae_class(cls: type) -> bool:
    """True for FAIR's MaskedAutoencoderHiera and its subclasses."""
    return fair_class(cls, "MaskedAutoencoderHiera") is not None


def all_blocks(model: FairModel) -> list[FairModel]:
    """Encoder blocks, then decoder blocks: the order in which sdpa_backend callables number them."""
    return [*model.blocks, *getattr(model, "decoder_blocks", ())]


def is_fairs_own(module: nn.Module, method: str, class_name: str) -> bool:
    """True if module.method is what FAIR's class `class_name` defines: not overridden, not patched."""
    if method in module.__dict__:
        return False
    base = fair_class(type(module), class_name)
    for cls in type(module).__mro__:
        if method in cls.__dict__ and not cls.__dict__.get("_hiera_ours", False):
            return cls is base
    return False


def blocks_are_fairs(blocks: Iterable[nn.Module]) -> bool:
    """True if every block and its attention compute what FAIR's do, so that the fast path may stand in."""
    for block in blocks:
        attn = getattr(block, "attn", None)
        if not isinstance(attn, nn.Module) or not is_fairs_own(block, "forward", "HieraBlock"):
            return False
        if not is_fairs_own(attn, "forward", "MaskUnitAttention"):
            return False
    return True
