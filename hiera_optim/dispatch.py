"""Decides in one place whether a model runs on the fused kernels or on the plain PyTorch path."""

from __future__ import annotations

import torch
from torch import nn

from hiera_optim.geometry import FairModel, Geometry
from hiera_optim.recognize import all_blocks

MINIMUM_CAPABILITY = (8, 0)
"""Ampere: bf16 tensor cores and cp.async."""


def compute_dtype(model: FairModel) -> torch.dtype:
    """Autocast's dtype where it is on, else the parameters' own."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    dtype: torch.dtype = model.patch_embed.proj.weight.dtype
    return dtype


def why_not_kernels(model: FairModel, geometry: Geometry, device: torch.device) -> str | None:
    """The reason why the fused kernels cannot run this model here, in a few words, or None when they can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
        return "the GPU is older than Ampere (compute capability 8.0)"
    dtype = compute_dtype(model)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} does not use the tensor cores' 16-bit formats"
    if not geometry.is_mae or not geometry.zorder:
        return "the model is not a masked autoencoder with mask_unit_size = q_stride ** (stages - 1)"
    overrides = getattr(model, "_hiera_overrides", ())
    if overrides:
        return f"its class has its own {', '.join(sorted(overrides))}"
    if not all(_has_fairs_layers(block) for block in all_blocks(model)):
        return "its blocks are not LayerNorm and exact GELU"
    # FAIR's attention goes through SDPA, which pads; the operators under it, called directly, do not.
    dims = {block.attn.head_dim for block in all_blocks(model)}
    if any(dim % 8 or dim > 256 for dim in dims):
        return f"its attention heads have {', '.join(map(str, sorted(dims)))} channels, not multiples of 8 up to 256"
    width = geometry.pred_features
    if width > 65536:
        return f"a predicted patch has {width} values"
    return None


def _has_fairs_layers(block: FairModel) -> bool:
    norms, act = (block.norm1, block.norm2), block.mlp.act
    return all(isinstance(n, nn.LayerNorm) for n in norms) and isinstance(act, nn.GELU) and act.approximate == "none"


def use_kernels(model: FairModel, geometry: Geometry, device: torch.device) -> bool:
    """Whether the fused kernels run this model on this device."""
    return why_not_kernels(model, geometry, device) is None
