"""Times one contender on one case in this process and prints a line of JSON.

python -m benchmarks.timing ours '{"variant": "base", "batch": 128}'
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from benchmarks.contenders import STEPS, Case


def measure(contender: str, case: Case, *, warmup: int = 5, steps: int = 20) -> dict[str, object]:
    """Median and spread of a step's time in milliseconds, peak memory, and seconds to the first step."""
    start = time.perf_counter()
    step = STEPS[contender](case)
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    median = statistics.median(times)
    samples = case.batch * case.accumulation
    return {
        "contender": contender,
        "case": case.name,
        "device": torch.cuda.get_device_name(),
        "ms": round(median, 3),
        "p10": round(times[len(times) // 10], 3),
        "p90": round(times[-1 - len(times) // 10], 3),
        "samples_per_second": round(samples / median * 1e3),
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "first_step_s": round(first, 1),
        "loss": round(float(loss), 4) if loss is not None else None,
    }


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    print(json.dumps(measure(sys.argv[1], Case(**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")))), flush=True)
