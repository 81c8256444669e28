"""What the kernel benchmarks share: ceilings, medians, and a sweep over alternatives that refuses wrong ones.

Every alternative is compared with float64 on poisoned outputs before it is timed; one that fails to compile,
or is wrong, gets a line that says so and no time. Alternatives compile in parallel threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.testing import do_bench

# Reached on an H200: bytes a microsecond by a large copy, bf16 operations a microsecond by a large product.
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
COMPILE_THREADS = 8

Outputs = tuple[torch.Tensor, ...]


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty and torch.empty_like give NaN (255 for bytes) inside, so that unwritten elements show."""
    originals = torch.empty, torch.empty_like

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 255)

        return made

    torch.empty, torch.empty_like = (poison(make) for make in originals)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = originals


def median_us(call: Callable[[], object]) -> float:
    """Median time of a call in microseconds, its inputs not in L2."""
    return float(do_bench(call, warmup=5, rep=20, return_mode="median")) * 1e3


def worst_error(outputs: Outputs, references: Outputs) -> float:
    """Largest relative (Frobenius) error over the outputs; infinite when one holds a value that is not
    finite."""
    worst = 0.0
    for out, reference in zip(outputs, references, strict=True):
        exact = reference.double()
        error = float((out.double() - exact).norm() / exact.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


class Deadline:
    """Seconds left of a script's allowance."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def passed(self) -> bool:
        return time.perf_counter() > self.end


def sweep(
    alternatives: dict[str, tuple[Callable[[], Outputs], Callable[[], object]]],
    references: Outputs,
    limit: float,
    deadline: Deadline,
) -> list[tuple[float, str]]:
    """Check, then time each alternative: (check call, timed call) by label -> [(microseconds, label)],
    fastest first.

    The check call computes what `references` hold, on fewer rows perhaps; the timed call is the full size.
    Prints a line for each alternative that is wrong or fails.
    """

    def first(label: str) -> str | Exception:
        try:
            alternatives[label][0]()
        except Exception as error:  # noqa: BLE001 - a tile that does not fit a device is a result, not a crash
            return error
        return label

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        compiled = list(pool.map(first, alternatives))
    times: list[tuple[float, str]] = []
    for label, state in zip(alternatives, compiled, strict=True):
        if isinstance(state, Exception):
            reason = (str(state).splitlines() or [""])[0][:120]
            print(f"    {label}: {type(state).__name__}: {reason}")
            continue
        try:
            with poisoned():
                error = worst_error(alternatives[label][0](), references)
            if not error < limit:
                print(f"    {label}: WRONG, relative error {error:.2e}, limit {limit:.0e}: not timed")
                continue
            if times and deadline.passed():
                print(f"    {label}: not timed, no time left")
                continue
            times.append((median_us(alternatives[label][1]), label))
        except Exception as failure:  # noqa: BLE001 - as above
            print(f"    {label}: {type(failure).__name__}: {str(failure)[:120]}")
    return sorted(times)


def time_of(times: list[tuple[float, str]], label: str) -> float:
    """The time of one alternative, NaN when it has none."""
    return next((us for us, other in times if other == label), float("nan"))


def ranking(times: list[tuple[float, str]], shown: int = 4) -> str:
    """The fastest few as `microseconds label`, on one line."""
    return ", ".join(f"{us:.1f} {label}" for us, label in times[:shown]) or "nothing right"
