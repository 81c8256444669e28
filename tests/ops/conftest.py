"""Kernel tests run in Triton's interpreter on the CPU: run this folder in a process of its own.

The variable has to be there before anything imports triton.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
