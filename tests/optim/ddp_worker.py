"""Two gloo ranks accumulate three micro-batches and write their gradients; run under torchrun by test_ddp."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hiera_optim import make_mae_mask

from .fair import batch_for, fast, mae


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = fast(mae())
    wrapped = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    parts = []
    for micro in range(3):
        x = batch_for(model, seed=10 * rank + micro)
        mask, keep_idx = make_mae_mask(wrapped, 2, 0.5, "cpu", generator=generator)
        parts.append((x, mask))
        with wrapped.no_sync() if micro < 2 else nullcontext():
            (wrapped(x, mask_ratio=0.5, mask=mask, keep_idx=keep_idx)[0] / 3).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    inputs = {f"{kind}{i}": t for i, part in enumerate(parts) for kind, t in zip("xm", part, strict=True)}
    torch.save({"gradients": gradients, "inputs": inputs}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
