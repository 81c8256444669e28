"""`make bench`: one table of this repository against FAIR's model and hiera-optim 0.2.1, on one GPU.

    python -m benchmarks.run [--rows headline|variants|ours|all] [--contenders ours,fair,hiera-optim]
                             [--hiera-optim DIR] [--record] [--prewarm 8]

Each measurement runs in a process of its own. Speed is printed only when the numerics check passes. hiera-optim is
timed where DIR holds
the package (`pip install --no-deps --target DIR hiera-optim==0.2.1`). With --record the table goes to
benchmarks/RESULTS.md with card, versions, commit, medians and spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

from benchmarks.contenders import ONE_D, VARIANTS, Case
from service.config.schema import ModelSection
from service.train.flops import peak_flops, training_flops

RESULTS = Path(__file__).with_name("RESULTS.md")
MINUTES = 5
"""What one measurement may take: a hang must not eat the time of the rows after it."""
LARGE = 512
"""Batches from here on leave no room for another process beside them."""

ROWS: dict[str, list[Case]] = {
    "headline": [
        Case(), Case(batch=1024, optimizer="adamw"), Case(dims=1), Case(dims=1, batch=512), Case("tiny"),
        Case("small"), Case("large"),
    ],
    "variants": [
        Case(v, q_pool=q) for v in ("tiny", "small", "base") for q in (1, 3)
    ] + [Case("huge", batch=64)],
    "ours": [
        Case(optimizer="adamw"), Case(optimizer="adamw", weights="master"), Case(optimizer="muon"),
        Case(optimizer="adamw", accumulation=4), Case(batch=1024, optimizer="adamw", weights="master"),
        Case(batch=1024, optimizer="muon"), Case("base-plus"),
    ],
}  # fmt: skip
FAIR_CAN = [Case(), Case("tiny"), Case("small"), Case("large")]
"""Where FAIR's eager model is timed: it has no 1-D loss, and its larger rows say nothing new."""


def possible(contender: str, case: Case) -> bool:
    """Whether a contender can run a case at all."""
    plain = case.weights == "bf16" and case.accumulation == 1 and case.optimizer in ("none", "adamw")
    return {"ours": True, "fair": case in FAIR_CAN, "hiera-optim": plain}[contender]


def measure(contender: str, case: Case, environment: dict[str, str]) -> dict[str, object] | None:
    """One measurement in its own process; None, with a line, when it fails."""
    command = [sys.executable, "-m", "benchmarks.timing", contender, json.dumps(dataclasses.asdict(case))]
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=60 * MINUTES
        )
    except subprocess.TimeoutExpired:
        print(f"{contender} {case.name}: no end after {MINUTES} minutes", flush=True)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{contender} {case.name}: failed: {reason[:200]}", flush=True)
        return None
    result: dict[str, object] = json.loads(lines[-1])
    return result


def cell(result: dict[str, object] | None) -> str:
    """Median and spread of a measurement."""
    if result is None:
        return "–"
    return f"{result['ms']} ({result['p10']}–{result['p90']})"


def flops(case: Case) -> float:
    """Of a sample's forward and backward, as `service.train.flops` counts them."""
    sizes = {**VARIANTS[case.variant], "in_chans": case.channels, "q_pool": case.q_pool, "mask_ratio": case.mask_ratio}
    return training_flops(ModelSection(**sizes | (ONE_D if case.dims == 1 else {})))


def row(case: Case, results: dict[str, dict[str, object] | None]) -> str:
    """A line of the table."""
    ours, theirs = results.get("ours"), results.get("hiera-optim")
    ratio = f"{float(ours['ms']) / float(theirs['ms']):.2f}" if ours and theirs else "–"  # type: ignore[arg-type]
    memory = " / ".join(f"{r['peak_reserved_gib']}" if r else "–" for r in (ours, theirs))
    rate = f"{ours['samples_per_second']:,}" if ours else "–"
    mfu, peak = "–", peak_flops(str(ours["device"])) if ours else None
    if ours and peak:
        mfu = f"{flops(case) * float(ours['samples_per_second']) / peak:.2f}"  # type: ignore[arg-type]
    first = f"{ours['first_step_s']}" if ours else "–"
    cells = [case.name, cell(results.get("fair")), cell(theirs), cell(ours), ratio, rate, memory, mfu, first]
    return "| " + " | ".join(cells) + " |"


HEADER = """| row | FAIR eager, ms | hiera-optim 0.2.1, ms | ours, ms | ours / hiera-optim | ours, samples/s \
| peak reserved GiB, ours / hiera-optim | MFU | first step, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def commit(given: str | None) -> str:
    """The commit that is measured."""
    if given:
        return given
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks against FAIR's Hiera and hiera-optim.")
    parser.add_argument("--rows", default="headline", help="headline, variants, ours, all; comma-separated")
    parser.add_argument("--contenders", default="ours,fair,hiera-optim")
    parser.add_argument(
        "--hiera-optim", default=os.environ.get("HIERA_OPTIM_DIR"), help="folder that holds hiera_optim"
    )
    parser.add_argument("--record", action="store_true", help=f"append the table to {RESULTS.name}")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    parser.add_argument("--commit", help="commit to name, where there is no git")
    parser.add_argument("--prewarm", type=int, default=0, help="compile hiera-optim's rows in so many processes first")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks need an NVIDIA GPU; none was found")
        return 1
    names = list(ROWS) if arguments.rows == "all" else arguments.rows.split(",")
    cases = [case for name in names for case in ROWS[name]]
    contenders = arguments.contenders.split(",")
    if not arguments.hiera_optim:
        contenders = [c for c in contenders if c != "hiera-optim"]
        print("hiera-optim is not timed: name its folder with --hiera-optim")
    environment = {"HIERA_OPTIM_DIR": str(arguments.hiera_optim), "PYTHONWARNINGS": "ignore"}

    check = subprocess.run([sys.executable, "-m", "benchmarks.numerics"], capture_output=True, text=True, check=False)
    print(check.stdout, end="", flush=True)
    if check.returncode:
        print(check.stderr[-2000:], "\nthe numerics check failed: no speed is reported", sep="")
        return 1
    if arguments.prewarm and "hiera-optim" in contenders:
        todo = [case for case in cases if possible("hiera-optim", case)]
        for processes, part in (
            (arguments.prewarm, [case for case in todo if case.batch < LARGE]),
            (1, [case for case in todo if case.batch >= LARGE]),
        ):
            with ThreadPoolExecutor(processes) as pool:
                list(pool.map(lambda case: measure("hiera-optim", case, environment), part))
    properties = torch.cuda.get_device_properties(0)
    title = (
        f"## {datetime.date.today()}, {properties.name}, torch {torch.__version__}, triton {triton.__version__}, "
        f"commit {commit(arguments.commit)}"
    )
    lines = [
        title,
        "",
        "Milliseconds a step, median of 20 (10th–90th percentile), each in its own process.",
        "",
        HEADER,
    ]
    print("\n".join(lines), flush=True)
    for case in cases:
        results = {c: measure(c, case, environment) if possible(c, case) else None for c in contenders}
        lines.append(row(case, results))
        print(lines[-1], flush=True)
    if arguments.record:
        with RESULTS.open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
