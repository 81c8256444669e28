"""DDP with accumulation: every rank ends with the gradients of all samples, as one process computes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from .fair import fast, mae, worst_gradient

ROOT = Path(__file__).parents[2]


def test_two_ranks_accumulate_the_gradients_of_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.optim.ddp_worker", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(2)]
    assert all(torch.equal(g, ranks[1]["gradients"][n]) for n, g in ranks[0]["gradients"].items())
    model = fast(mae())
    masks = set()
    for rank in ranks:
        for micro in range(3):
            x, mask = rank["inputs"][f"x{micro}"], rank["inputs"][f"m{micro}"]
            masks.add(tuple(mask.flatten().tolist()))
            (model(x, mask=mask)[0] / 6).backward()
    assert len(masks) > 3
    expected = {n: p.grad for n, p in model.named_parameters()}
    assert worst_gradient(ranks[0]["gradients"], expected) < (1e-5, "")
