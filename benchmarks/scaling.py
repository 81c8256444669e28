"""Per-GPU step on several GPUs of one host against one GPU of the same host, in one run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaling [--rows base,tiny,base1024,muon1024] [--steps 200]

Every rank first times the captured step by itself, all at the same time, then with the all-reduce overlapped in the
graph. After the steps the weights of all ranks are compared bit for bit with rank 0's. Rank 0 prints a table for
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics

import torch
import torch.distributed as dist

from benchmarks.contenders import Case, train_step
from hiera_optim.training import TrainStep

ROWS = {
    "base": Case(optimizer="adamw"),
    "tiny": Case("tiny", optimizer="adamw"),
    "base-master": Case(optimizer="adamw", weights="master"),
    "base1024": Case(batch=1024, optimizer="adamw"),
    "muon1024": Case(batch=1024, optimizer="muon"),
    "master1024": Case(batch=1024, optimizer="adamw", weights="master"),
}


def times(step: TrainStep, batch: int, rank: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` captured steps after 10 of warm-up."""
    x = torch.randn_like(step._x, dtype=torch.float32).to(step._x.dtype)
    ids = torch.arange(batch, device="cuda") + rank * batch
    out = []
    for i in range(steps + 10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(x, ids)
        end.record()
        ids.add_(batch * int(os.environ["WORLD_SIZE"]))
        if i >= 10:
            out.append((begin, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in out]


def largest(value: float) -> float:
    """The largest of the ranks' values."""
    tensor = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scaling over the GPUs of one host.")
    parser.add_argument("--rows", default="base,tiny,base-master,base1024,muon1024")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    single: dict[str, list[float]] = {}
    names = options.rows.split(",")
    for name in names:
        case = ROWS[name]
        step = train_step(case)
        single[name] = times(step, case.batch, rank, min(options.steps, 50))
        step.release()
        del step
        gc.collect()
        torch.cuda.empty_cache()
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {options.steps} steps a row")
        print("| row, batch a rank | 1 GPU, ms | all GPUs, ms a step | ratio | samples/s | weights equal |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        case = ROWS[name]
        step = train_step(case)
        together = times(step, case.batch, rank, options.steps)
        flat = step.optimizer.params.flat
        first = flat.clone()
        dist.broadcast(first, 0)
        equal = largest(0.0 if torch.equal(flat, first) else 1.0) == 0.0
        alone, joint = largest(statistics.median(single[name])), largest(statistics.median(together))
        spread = sorted(together)
        if rank == 0:
            print(
                f"| {case.name} | {alone:.2f} | {joint:.2f} ({spread[len(spread) // 10]:.2f}–"
                f"{spread[-1 - len(spread) // 10]:.2f}) | {joint / alone:.3f} | "
                f"{case.batch * world / joint * 1e3:,.0f} | {'yes' if equal else 'NO'} |",
                flush=True,
            )
        step.release()
        del step, flat, first
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
