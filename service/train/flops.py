"""Model FLOPs of a training sample, and what GPUs can do, for model FLOPs utilisation (MFU).

MFU as in PaLM (Chowdhery et al., arXiv:2204.02311, appendix B): FLOPs that the mathematics of the model
needs, 2 m n k for a product of [m, k] by [k, n], backward twice forward, recomputation not counted, over
the peak of the hardware. Counted as the masked autoencoder needs them: the encoder on kept mask units only,
predictions of masked tokens only. Norms, activations and softmax are not counted.
"""

from __future__ import annotations

import math
import re

from service.config.geometry import kept_mask_units, mask_unit_count
from service.config.schema import ModelSection

# Dense bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (half of the number "with sparsity"
# where only that is given). The first name whose words are in the device's name wins: "A40" is not an RTX A4000.
_PEAKS = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10", 125e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name its driver gives, None if it is not in the table."""
    return next((peak for name, peak in _PEAKS if re.search(rf"\b{name}\b", device_name)), None)


def training_flops(model: ModelSection) -> float:
    """FLOPs of forward and backward of one sample."""
    return 3.0 * forward_flops(model)


def forward_flops(model: ModelSection) -> float:
    """FLOPs of one sample's masked-autoencoder forward pass, from the shapes in FAIR's hiera.py and
    hiera_mae.py.
    """
    units = mask_unit_count(model)
    kept = kept_mask_units(units, model.mask_ratio)
    tokens = math.prod(model.mask_unit_size)  # in a mask unit, at the current stage
    dim = model.embed_dim
    flops = _matmul(kept * tokens, math.prod(model.patch_kernel) * model.in_chans, dim)
    fused: list[tuple[int, int]] = []  # (tokens, channels) of the stages that have a fusion head
    for stage, depth in enumerate(model.stages):
        for block in range(depth):
            first = stage > 0 and block == 0
            dim_out = dim * 2 if first else dim
            tokens_out = tokens // math.prod(model.q_stride) if first and stage <= model.q_pool else tokens
            # FAIR's attention lags a stage behind by one block: a stage's first block has its predecessor's
            # kind.
            local = model.mask_unit_attn[stage - 1 if first else stage]
            keys = tokens if local else kept * tokens
            flops += _block(kept * tokens, kept * tokens_out, keys, dim, dim_out, model.mlp_ratio)
            dim, tokens = dim_out, tokens_out
        if stage < model.q_pool:
            fused.append((tokens, dim))
    # A fusion head's convolution has kernel = stride, so each of its input values is used once per output
    # channel.
    flops += sum(_matmul(kept * t, c, dim) for t, c in fused)
    width = model.decoder_embed_dim
    flops += _matmul(kept * tokens, dim, width)
    every = units * tokens
    flops += model.decoder_depth * _block(every, every, every, width, width, model.mlp_ratio)
    side = model.patch_stride[-1] * model.q_stride[-1] ** model.q_pool
    values = side ** min(2, len(model.q_stride)) * model.in_chans
    return flops + _matmul((units - kept) * tokens, width, values)


def _matmul(rows: int, inner: int, columns: int) -> float:
    return 2.0 * rows * inner * columns


def _block(rows: int, rows_out: int, keys: int, dim: int, dim_out: int, mlp_ratio: float) -> float:
    hidden = int(dim_out * mlp_ratio)
    flops = _matmul(rows, dim, 3 * dim_out) + _matmul(rows_out, dim_out, dim_out)
    flops += 2 * _matmul(rows_out, keys, dim_out)  # scores, and their product with the values
    flops += 2 * _matmul(rows_out, dim_out, hidden)
    if dim != dim_out:
        flops += _matmul(rows, dim, dim_out)
    return flops
