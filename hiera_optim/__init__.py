"""Fast training of FAIR's Hiera and its masked autoencoder, in place, with the same numbers and weights.

    from hiera_optim import optimize
    optimize(model)

`optimize` takes a Hiera or MaskedAutoencoderHiera from any module (PyPI's `hiera`, an in-tree copy, a
subclass) and `restore` gives it back. Importing this package imports neither hiera, timm nor lightning.

Where to look: geometry (sizes and token order), masks, encoder and mae (the plain PyTorch path), pieces
(FAIR's methods one by one), optimize (the exchange), checkpointing, state_dict, lightning, compat (import
hiera without timm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiera_optim.adapters import HieraAdapter, auto_detect, get_hiera_adapter
from hiera_optim.attention import BACKEND_NAMES, MaskUnitAttentionFast
from hiera_optim.checkpointing import disable_stage_checkpointing, enable_stage_checkpointing
from hiera_optim.compat import import_hiera
from hiera_optim.geometry import Geometry
from hiera_optim.masks import MAEStepInputs, make_mae_mask, sample_mask
from hiera_optim.optimize import optimize, recommended_backend, restore, swap_mask_unit_attention
from hiera_optim.state_dict import (
    clean_state_dict,
    interpolate_position_embeddings,
    load_weights,
    state_dict_mismatches,
)

if TYPE_CHECKING:
    from hiera_optim.lightning import MAEStaticInputsCallback, feed_batch

__all__ = [
    "BACKEND_NAMES",
    "Geometry",
    "HieraAdapter",
    "MAEStaticInputsCallback",
    "MAEStepInputs",
    "MaskUnitAttentionFast",
    "auto_detect",
    "clean_state_dict",
    "disable_stage_checkpointing",
    "enable_stage_checkpointing",
    "feed_batch",
    "get_hiera_adapter",
    "import_hiera",
    "interpolate_position_embeddings",
    "load_weights",
    "make_mae_mask",
    "optimize",
    "recommended_backend",
    "restore",
    "sample_mask",
    "state_dict_mismatches",
    "swap_mask_unit_attention",
]

_LAZY = {"MAEStaticInputsCallback", "feed_batch"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from hiera_optim import lightning

        return getattr(lightning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
