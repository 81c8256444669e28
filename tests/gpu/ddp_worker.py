"""One rank of a captured run over NCCL: its part of each global batch, and the weights it ends with."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.models import batch_for, trainer


def main(folder: Path, kind: str, steps: int, accumulation: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    run = trainer(kind=kind, micro_batch=4, accumulation=accumulation)
    per_rank = 4 * accumulation
    losses, norms = [], []
    begin = time.monotonic()
    for i in range(steps):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        x = batch_for(run.model, world * per_rank, seed=i)[mine]
        ids = torch.arange(i * world * per_rank, (i + 1) * world * per_rank, device=device)[mine]
        report = None
        for part, part_ids in zip(x.chunk(accumulation), ids.chunk(accumulation), strict=True):
            report = run.step(part, part_ids)
        assert report is not None
        losses.append(report.loss.clone())
        norms.append(report.grad_norm.clone())
        if i % 50 == 25:  # evaluation is no collective, so ranks may do it at different times
            run.step.evaluate(x, ids)
    torch.cuda.synchronize()
    result = {
        "losses": torch.stack(losses).cpu(),
        "norms": torch.stack(norms).cpu(),
        "movement": run.movement.float().cpu(),
        "weights": run.optimizer.params.flat.cpu(),
        "seconds": torch.tensor(time.monotonic() - begin),
    }
    torch.save(result, folder / f"rank{rank}.pt")
    run.step.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
