"""Starts worker modules of this folder under torchrun, with a limit on their time: a hang is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 270
"""A first run compiles every kernel: a minute alone, several beside other tests; pytest's own limit is 300."""


def launch(ranks: int, module: str, *arguments: str, **variables: str) -> None:
    """Runs `python -m module arguments` on `ranks` GPUs; variables are added to the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
