"""Where there is no GPU, kernel tests run in Triton's interpreter on the CPU: run this folder in a process of its own.

The variable has to be there before anything imports triton.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
