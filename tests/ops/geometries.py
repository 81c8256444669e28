"""Small FAIR models of every dimensionality, for the kernels' tests."""

from __future__ import annotations

import warnings

from torch import nn

from hiera_optim.geometry import Geometry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hiera import MaskedAutoencoderHiera

SMALL = {"embed_dim": 16, "num_heads": 1, "decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2}
MODELS = {
    "1d": {
        "input_size": (64,), "in_chans": 8, "q_stride": (2,), "mask_unit_size": (4,), "patch_kernel": (7,),
        "patch_stride": (4,), "patch_padding": (3,), "stages": (1, 1, 2), "q_pool": 2,
        "mask_unit_attn": (True, True, False),
    },
    "2d": {
        "input_size": (48, 64), "in_chans": 3, "mask_unit_size": (4, 4), "stages": (1, 1, 2), "q_pool": 1,
        "mask_unit_attn": (True, True, False),
    },
    "2d-pool2": {
        "input_size": (64, 32), "in_chans": 1, "mask_unit_size": (4, 4), "stages": (2, 1, 1), "q_pool": 2,
        "mask_unit_attn": (True, True, False), "embed_dim": 32,
    },
    "3d": {
        "input_size": (4, 32, 32), "in_chans": 2, "q_stride": (1, 2, 2), "mask_unit_size": (1, 4, 4),
        "patch_kernel": (3, 7, 7), "patch_stride": (2, 4, 4), "patch_padding": (1, 3, 3), "stages": (1, 1, 1),
        "q_pool": 1, "mask_unit_attn": (True, True, False), "sep_pos_embed": True,
    },
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Geometry]:
    """The model and its geometry."""
    model: nn.Module = MaskedAutoencoderHiera(**{**SMALL, **MODELS[name]})
    return model, Geometry.from_model(model)
