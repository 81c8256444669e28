"""Times the optimizers on a Hiera MAE's parameters: milliseconds, bytes moved, and the floor of each.

    python -m benchmarks.kernels.optim [--model base] [--json]

Rows: our AdamW and Muon (bfloat16 weights with float32 masters, and pure bfloat16) captured in a CUDA graph,
the gradient norm, torch's fused AdamW, torch.optim.Muon. Numerics are checked first against plain PyTorch; no
time is printed when they fail.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hiera_optim.optim import AdamW, FlatOptimizer, Muon, muon_parameters, no_decay_parameters
from hiera_optim.optim.adamw import adamw_reference
from hiera_optim.optim.muon import apply_reference, pack_reference
from hiera_optim.optim.newton_schulz import flops, newton_schulz

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 96, "num_heads": 1, "stages": (1, 2, 7, 2)},
    "base": {"embed_dim": 96, "num_heads": 1, "stages": (2, 3, 16, 3)},
    "large": {"embed_dim": 144, "num_heads": 2, "stages": (2, 6, 36, 4)},
    "huge": {"embed_dim": 256, "num_heads": 4, "stages": (2, 6, 36, 4)},
}
# Bytes a second and bfloat16 operations a second of an H200 (the latter as measured: 790e12).
BANDWIDTH, THROUGHPUT = 4.8e12, 790e12


def build(model: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The MAE with 8 channels on the GPU, with random gradients to come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hiera.hiera_mae import MaskedAutoencoderHiera
    torch.manual_seed(0)
    built: nn.Module = MaskedAutoencoderHiera(**MODELS[model], q_pool=2, in_chans=8)
    return built.to("cuda", dtype)


def adamw(model: nn.Module, **arguments: Any) -> AdamW:
    return AdamW(model.named_parameters(), lr=1e-4, no_decay=no_decay_parameters(model), **arguments)


def muon(model: nn.Module, **arguments: Any) -> Muon:
    no_decay = no_decay_parameters(model)
    return Muon(model.named_parameters(), muon=muon_parameters(model), lr=1e-4, no_decay=no_decay, **arguments)


def fill_gradients(model: nn.Module) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype) * 1e-2
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check_adamw() -> float:
    """Largest relative error of moments and masters after one kernel step, against `adamw_reference`."""
    model = build("tiny")
    optimizer = adamw(model)
    fill_gradients(model)
    tensors = [optimizer.params.flat, optimizer.flat_grads[0], optimizer.exp_avg, optimizer.exp_avg_sq]
    assert optimizer.master is not None
    twins = [tensor.clone() for tensor in (*tensors, optimizer.master)]
    scale, step = torch.tensor(0.5, device="cuda"), torch.ones((), dtype=torch.int64, device="cuda")
    optimizer.step(scale)
    param, grad, exp_avg, exp_avg_sq, master = twins
    adamw_reference(param, grad, exp_avg, exp_avg_sq, master, optimizer.lr, step, scale, optimizer.settings)
    ours = (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.master)
    return max(relative(a, b) for a, b in zip(ours, twins[2:], strict=True))


def check_muon() -> float:
    """Relative error of the weights' change after a step, against plain PyTorch iterating in float32."""
    model = build("tiny")
    optimizer = muon(model)
    fill_gradients(model)
    end, plan, matrices = optimizer.params.ranges["muon"][1], optimizer.plan, optimizer.matrices
    assert optimizer.master is not None
    start, grad = optimizer.master[:end].clone(), optimizer.flat_grads[0][:end].clone()
    momentum, weights, expected = torch.zeros_like(start), start.bfloat16(), start.clone()
    optimizer.step()

    packed, out = (torch.zeros(plan.chunk, device="cuda") for _ in range(2))
    pack_reference(grad, momentum, packed, None, matrices, list(plan.placements), optimizer.beta, True, False)
    for batch in plan.batches[0]:
        workspace = torch.empty(2 * batch.count * batch.rows**2, device="cuda")
        newton_schulz(batch.view(packed), batch.view(out), workspace)
    decay, factors = optimizer.settings.weight_decay, optimizer.factors
    apply_reference(weights, expected, out.view(1, -1), optimizer.lr, matrices, plan.placements, factors, decay)
    return relative(optimizer.master[:end] - start, expected - start)


def time_ms(run: Callable[[], object], repeats: int = 30) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile in milliseconds, by CUDA events, after warm-up."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def step_of(optimizer: FlatOptimizer) -> Callable[[], object]:
    scale = torch.ones((), device="cuda")
    return captured(lambda: optimizer.step(scale))


def torch_fused(model: nn.Module) -> Callable[[], object]:
    fill_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return optimizer.step


def torch_muon(model: nn.Module) -> Callable[[], object]:
    fill_gradients(model)
    names = muon_parameters(model)
    matrices = [p for n, p in model.named_parameters() if n in names and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    first, second = torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4, fused=True)
    return lambda: (first.step(), second.step())


def rows(name: str) -> list[dict[str, Any]]:
    """One dict a row: ms, spread, bytes, floor in ms (bytes or operations, whichever is larger)."""

    def row(label: str, run: Callable[[], object], nbytes: float = 0.0, operations: float = 0.0) -> None:
        ms, low, high = time_ms(run)
        floor = max(nbytes / BANDWIDTH, operations / THROUGHPUT) * 1e3
        times = {"ms": round(ms, 3), "p10": round(low, 3), "p90": round(high, 3)}
        result.append({"row": label, **times, "gbytes": round(nbytes / 1e9, 3), "floor_ms": round(floor, 3)})
        torch.cuda.empty_cache()

    result: list[dict[str, Any]] = []
    numel = sum(p.numel() for p in build(name).parameters())
    row("AdamW, bf16 + fp32 master", step_of(adamw(build(name))), 28 * numel)
    row("AdamW, pure bf16", step_of(adamw(build(name), master=False)), 22 * numel)
    row("torch fused AdamW, pure bf16 (bf16 moments)", torch_fused(build(name)), 14 * numel)
    row("torch fused AdamW, fp32", torch_fused(build(name, torch.float32)), 28 * numel)
    row("gradient norm, bf16", captured(adamw(build(name)).grad_norm), 2 * numel)
    summing = adamw(build(name), fp32_accumulation=True)
    row("fp32 accumulation of a micro-batch", captured(summing.accumulate), 12 * numel)
    optimizer = muon(build(name))
    work = sum(flops(batch.rows, batch.cols) * batch.count for batch in optimizer.plan.batches[0])
    row("Muon, bf16 + fp32 master", step_of(optimizer), 28 * numel, work)
    row("  of it Newton-Schulz", captured(optimizer._orthogonalize), 0.0, work)
    row("torch.optim.Muon + fused AdamW, pure bf16", torch_muon(build(name)), 0.0, work)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="base")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU")
        return 1
    errors = {"AdamW": (check_adamw(), 1e-5), "Muon": (check_muon(), 0.05)}
    for label, (error, limit) in errors.items():
        if not error < limit:
            print(f"{label} is wrong: relative error {error:.2e}, limit {limit:.0e}; nothing was timed")
            return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.model}")
    print("relative errors: " + ", ".join(f"{label} {error:.1e}" for label, (error, _) in errors.items()))
    for row in rows(arguments.model):
        if arguments.json:
            print(json.dumps(row))
        else:
            spread = f"{row['p10']:.3f} to {row['p90']:.3f}"
            print(f"{row['row']:46} {row['ms']:8.3f} ms ({spread:16})  floor {row['floor_ms']:.3f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
