"""Captured steps over NCCL on two GPUs: no hang, equal ranks, and the weights of one GPU with the double batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .launching import launch
from .models import distance, train, trainer

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# runtime.allocator's presets; registration of captured buffers hangs with expandable segments (nccl#2389)
ALLOCATORS = {
    "default": {},
    "captured-ddp": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    "large-batch": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"},
}


def two_ranks(folder: Path, kind: str, steps: int, accumulation: int, **variables: str) -> list[dict[str, Any]]:
    launch(
        2,
        "tests.gpu.ddp_worker",
        str(folder),
        kind,
        str(steps),
        str(accumulation),
        NCCL_GRAPH_REGISTER="0",
        **variables,
    )
    ranks = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)]
    for name in ("losses", "norms", "weights"):
        assert torch.equal(ranks[0][name], ranks[1][name]), f"{name} differ between the ranks"
    return ranks


def compare(rank: dict[str, Any], kind: str, steps: int, accumulation: int) -> None:
    """With one GPU and the double batch, beside what another order of its samples changes."""
    batch = 8 * accumulation
    one, permuted = trainer(kind=kind, micro_batch=batch), trainer(kind=kind, micro_batch=batch)
    losses = torch.stack(train(one, steps)).cpu()
    train(permuted, steps, order=torch.arange(batch - 1, -1, -1, device="cuda"))
    noise = distance(permuted.movement, one.movement)
    apart = distance(rank["movement"].cuda(), one.movement)
    print(f"two ranks against one: {apart:.2e}, order of samples: {noise:.2e}, {rank['seconds'].item():.1f} s")
    assert distance(rank["losses"][:10], losses[:10]) < 1e-3
    assert apart < max(2 * noise, 0.02)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_two_hundred_steps(allocator: str, tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, "adamw", 200, 1, **ALLOCATORS[allocator])
    compare(ranks[0], "adamw", 200, 1)


@pytest.mark.parametrize(("kind", "accumulation"), [("adamw", 3), ("muon", 1), ("muon", 2)])
def test_accumulation_and_muon(kind: str, accumulation: int, tmp_path: Path) -> None:
    compare(two_ranks(tmp_path, kind, 20, accumulation)[0], kind, 20, accumulation)
