"""Fails unless torch and Triton are those of oldest.txt: PYTHONPATH has to put them before the newest ones."""

import sys
from pathlib import Path

import torch
import triton

wanted = Path(__file__).with_name("oldest.txt").read_text(encoding="utf-8").split()
found = [f"torch=={torch.__version__.split('+')[0]}", f"triton=={triton.__version__}"]
if not set(found) <= set(wanted):
    sys.exit(f"{' and '.join(found)} would be tested, not {' '.join(wanted)}")
