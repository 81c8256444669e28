"""Starts worker modules of this folder under torchrun, with a limit on their time: a hang is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 270
"""A first run compiles every kernel: a minute alone, several beside other tests."""
LEAVING = 60
"""Seconds for torchrun to end its workers, which are in sessions of their own: killing it alone leaves them running."""


def launch(ranks: int, module: str, *arguments: str, **variables: str) -> None:
    """Runs `python -m module arguments` on `ranks` GPUs; variables are added to the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*command, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output = process.communicate(timeout=LEAVING)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        raise AssertionError(f"no end after {SECONDS} s:\n{output[-8000:]}") from None
    assert process.returncode == 0, output[-8000:]
