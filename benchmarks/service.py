"""What the service costs besides training, on the CPU: start-up, the launcher's memory, the exporter's throughput.

    python -m benchmarks.service

Prints a table for benchmarks/RESULTS.md. Training is the quick start's model on synthetic data, one process; runs
with and without metrics alternate, and the medians of their log events are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SETTINGS = [
    "data.kind=synthetic", "data.val_fraction=0.1", "data.synthetic_samples=1000", "train.steps=120",
    "train.log_every=20",
    "train.global_batch=8", "train.eval_samples=8", "checkpoint.every_minutes=null", "metrics.port=0",
    "runtime.threads=1",
]  # fmt: skip
ROUNDS = 3


def seconds(command: list[str], repeats: int = 7) -> tuple[float, float, float]:
    """Minimum, median and maximum wall time of a command."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times), max(times)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def run(command: list[str], metrics: bool) -> tuple[float, float]:
    """Median samples a second over the log events of a run, and the launcher's largest memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*SETTINGS, f"run.dir={folder}/run", f"metrics.enabled={str(metrics).lower()}"]
        arguments = [part for option in options for part in ("--set", option)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, "--config", "quickstart", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment,
        )  # fmt: skip
        peak = 0.0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.5):
                try:
                    peak = max(peak, resident_mib(process.pid))
                except FileNotFoundError:
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, errors = process.communicate()
        done.set()
        watcher.join()
        if process.returncode:
            raise RuntimeError(errors.decode()[-2000:])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        rates = [e["samples_per_second"] for e in map(json.loads, lines) if "samples_per_second" in e]
        return statistics.median(rates[1:]), peak


def main() -> None:
    command = [str(Path(sys.executable).with_name("hiera-train"))]
    print("| what | measured | bound |")
    print("| --- | --- | --- |")
    for label, rest in (("hiera-train --help", ["--help"]), ("config check base", ["config", "check", "quickstart"])):
        low, median, high = seconds([*command, *rest])
        print(f"| {label}, s | {median:.2f} ({low:.2f} to {high:.2f}) | 0.5 |", flush=True)
    on, off, memory = [], [], 0.0
    for _ in range(ROUNDS):
        rate, peak = run(command, True)
        on.append(rate)
        memory = max(memory, peak)
        off.append(run(command, False)[0])
    loss = 1 - statistics.median(on) / statistics.median(off)
    print(f"| launcher, MiB | {memory:.0f} | 150 |")
    print(f"| samples/s with metrics | {', '.join(f'{r:.1f}' for r in on)} | |")
    print(f"| samples/s without metrics | {', '.join(f'{r:.1f}' for r in off)} | |")
    print(f"| throughput lost to the exporter | {loss:.1%} | 1 % |")


if __name__ == "__main__":
    main()
