"""The Lightning callback under a real Trainer, as the published package's users write it, on one GPU and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .launching import launch

pytestmark = pytest.mark.timeout(900)
MODES = ["eager", "default", "reduce-overhead"]


def fit(folder: Path, ranks: int, mode: str) -> list[dict[str, Any]]:
    launch(ranks, "tests.gpu.lightning_worker", str(folder), mode)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(ranks)]


def check(result: dict[str, Any]) -> None:
    losses = result["losses"]
    assert len(losses) == 16
    assert torch.isfinite(losses).all()
    assert losses[-4:].mean() < losses[:4].mean()
    assert len(set(result["addresses"].tolist())) == 1


@pytest.mark.gpu
def test_one_gpu(tmp_path: Path) -> None:
    results = []
    for mode in MODES:
        (tmp_path / mode).mkdir()
        (result,) = fit(tmp_path / mode, 1, mode)
        check(result)
        results.append(result["losses"])
    # the same seeds: the same data and masks; rounding, which is not the same, spreads with training
    for other in results[1:]:
        assert torch.allclose(results[0][:4], other[:4], rtol=1e-2)
        assert torch.allclose(results[0], other, rtol=5e-2)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_with_a_static_graph(mode: str, tmp_path: Path) -> None:
    ranks = fit(tmp_path, 2, mode)
    for result in ranks:
        check(result)
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert not torch.equal(ranks[0]["masks"], ranks[1]["masks"])
