"""Kernels whose tiles depend on the GPU, compiled for GPUs that are not here: they fit, from Ampere to Blackwell."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hiera_optim import import_hiera
from hiera_optim.ops.attention_config import shared_memory_limit
from tests.targets.launches import Chip, Launch, assemble, training_step

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

CHIPS = [
    Chip("A100", (8, 0), 108),
    Chip("L40S", (8, 9), 142),
    Chip("H200", (9, 0), 132),
    Chip("B200", (10, 0), 148),
    Chip("RTX 5090", (12, 0), 170),
]
LINE: dict[str, Any] = {
    "input_size": (1024,), "q_stride": (2,), "mask_unit_size": (8,), "patch_kernel": (31,), "patch_stride": (16,),
    "patch_padding": (15,),
}  # fmt: skip
CHOSEN_BY_CHIP = ("attention", "linear_gelu")
"""Beginnings of the modules whose kernels are tiled by the chip."""
MOST_STACK = 2048
"""Bytes of spilled registers a thread. Most kernels spill nothing; the worst, one launch a step, is known."""


def launches(chip: Chip, **arguments: Any) -> list[Launch]:
    """A step of Base, one block a stage, with 8 channels."""
    size: dict[str, Any] = {"input_size": (224, 224), "in_chans": 8, "embed_dim": 96, "num_heads": 1}
    model = import_hiera().MaskedAutoencoderHiera(**size | arguments, stages=(1, 1, 1, 1), decoder_depth=2)
    return training_step(model, chip, 128, torch.bfloat16)


def module(launch: Launch) -> str:
    return str(launch.kernel.__module__).rsplit(".", 1)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_kernels_fit(chip: Chip) -> None:
    todo = dict.fromkeys(launch for launch in launches(chip) if module(launch).startswith(CHOSEN_BY_CHIP))
    assert {"forward", "backward"} <= {part for launch in todo for part in launch.kernel.__name__.split("_")}
    for launch in todo:
        usage = assemble(launch, chip)
        assert usage.shared_bytes <= shared_memory_limit(chip.capability), launch.name
        assert usage.tensor_memory <= 512, launch.name
        assert usage.stack_bytes <= MOST_STACK, launch.name


def test_a_step_launches_every_kernel() -> None:
    """What the list above is taken from: that no kernel escapes it, in 2-D and in 1-D."""
    seen = Counter(module(launch) for launch in launches(CHIPS[2]) + launches(CHIPS[2], **LINE))
    assert seen.keys() == {
        "sample_masks", "patch_embed", "units", "layer_norm", "attention_resident", "attention_key_rows",
        "attention_blocks", "linear_gelu_kernels", "pooling", "column_sum", "batched_sums", "mae_loss",
        "adamw_kernel", "muon_kernel",
    }  # fmt: skip
