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
    pytest.mark.timeout(900),
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
    """With one GPU and the double batch.

    Beside it, what it changes there to sum the gradients of two halves in bfloat16, as the all-reduce does. Gradients
    that were not averaged, or of half the samples, show in the first norms, before training has spread any noise.
    """
    half = 4 * accumulation
    one = trainer(kind=kind, micro_batch=2 * half)
    halves = trainer(kind=kind, micro_batch=half, accumulation=2, fp32_accumulation=False)
    results = []
    for run in (one, halves):
        losses, norms = [], []
        for i in range(steps):
            losses += train(run, 1, first=i)
            norms.append(run.step._output.grad_norm.clone())
        results.append((torch.stack(losses).cpu(), torch.stack(norms).cpu()))
    losses, norms = results[0]
    noise = distance(halves.movement, one.movement)
    apart = distance(rank["movement"].cuda(), one.movement)
    print(f"two ranks against one GPU: {apart:.2e}, halves there: {noise:.2e}; {rank['seconds'].item():.1f} s")
    assert distance(rank["losses"][:5], losses[:5]) < 1e-3
    assert distance(rank["norms"][:5], norms[:5]) < 1e-2
    assert distance(rank["losses"][-10:], losses[-10:]) < 1e-2
    assert apart < max(2 * noise, 0.05)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_two_hundred_steps(allocator: str, tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, "adamw", 200, 1, **ALLOCATORS[allocator])
    compare(ranks[0], "adamw", 200, 1)


@pytest.mark.parametrize(("kind", "accumulation"), [("adamw", 3), ("muon", 1), ("muon", 2)])
def test_accumulation_and_muon(kind: str, accumulation: int, tmp_path: Path) -> None:
    compare(two_ranks(tmp_path, kind, 20, accumulation)[0], kind, 20, accumulation)
