"""Times the MLP's GELU work: cuBLAS with elementwise kernels against the fused GEMMs, forward and backward.

    python -m benchmarks.kernels.mlp [--seconds 55] [--batch 128] [--model base|large|huge] [--elementwise]

Prints for each (rows, inner, outer) the floors by bytes and by operations, cuBLAS alone, cuBLAS and our
elementwise kernel, and the fastest fused tiles. With --elementwise, tiles of the elementwise kernels instead.
Nothing that differs from float64 is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch

from benchmarks.kernels.sweep import (
    BYTES_PER_US,
    FLOPS_PER_US,
    Deadline,
    median_us,
    ranking,
    sweep,
    time_of,
)
from hiera_optim.ops.linear_gelu import GemmConfig, gemm_config
from hiera_optim.ops.mlp import (
    bias_gelu_forward,
    bias_gelu_forward_reference,
    gelu_backward,
    gelu_backward_reference,
    linear_gelu_backward,
    linear_gelu_forward,
)

# Rows a sample and C (F = 4C), mask ratio 0.6 at 224 x 224; the decoder last, then its last block on masked
# tokens.
SHAPES = {
    "base": [(1216, 96), (304, 192), (76, 384), (76, 768), (196, 512), (120, 512)],
    "large": [(1216, 144), (304, 288), (76, 576), (76, 1152), (196, 512)],
    "huge": [(1216, 256), (304, 512), (76, 1024), (76, 2048), (196, 512)],
}
CHECK_ROWS = 4096 + 16
LIMIT = 3e-3


def name(config: GemmConfig) -> str:
    parts = [f"{config.block_n}x{config.block_f}x{config.block_k}w{config.num_warps}s{config.num_stages}"]
    parts += ["t"] * config.tma + ["h"] * config.halves + ["e"] * config.early_factor
    if config.programs_per_multiprocessor:
        parts.append(f"p{config.programs_per_multiprocessor}")
    return "".join(parts)


def alternatives(inner: int, outer: int, *, backward: bool) -> list[GemmConfig]:
    """The default and what is worth timing against it on Hopper."""
    default = gemm_config(inner, outer, torch.bfloat16, torch.device("cuda"))
    change = functools.partial(dataclasses.replace, default)
    configs = [
        default,
        change(halves=False),
        change(num_stages=2),
        change(num_stages=2, num_warps=4),
        change(num_stages=2, programs_per_multiprocessor=2),
        change(block_n=64, num_warps=4, num_stages=2, halves=False),
        change(block_f=256, num_stages=3, programs_per_multiprocessor=1),
        change(block_n=256, num_stages=3),
        GemmConfig(block_k=default.block_k),
    ]
    if inner <= 192:
        configs.append(change(block_k=128, num_stages=2))
    if backward:
        configs.append(change(early_factor=True, halves=False))
    return list(dict.fromkeys(configs))


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def run_fused(rows: int, inner: int, outer: int, deadline: Deadline) -> None:
    """Print forward's and backward's lines for [rows, inner] by [inner, outer]."""
    x, dy = random(rows, inner), random(rows, inner)
    w1, w2 = random(outer, inner, scale=inner**-0.5), random(inner, outer, scale=outer**-0.5)
    bias = random(outer)
    head, everything = slice(0, min(CHECK_ROWS, rows)), slice(0, rows)
    flop_floor = 2 * rows * inner * outer / FLOPS_PER_US
    byte_floor = (rows * (inner + 2 * outer) + inner * outer) * 2 / BYTES_PER_US
    exact = bias_gelu_forward_reference(x[head].double() @ w1.double().T, bias.double())

    def forward(r: slice, config: GemmConfig) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_gelu_forward(x[r], w1, bias, config=config)

    def unfused(r: slice) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.addmm(bias, x[r], w1.T)
        return bias_gelu_forward(h, None, out=h)

    # The elementwise kernel sees h rounded to bf16, so its error is larger than the fused kernel's.
    pair = sweep({"pair": (lambda: unfused(head), lambda: unfused(everything))}, exact, 2 * LIMIT, deadline)
    times = sweep(
        {
            name(c): (functools.partial(forward, head, c), functools.partial(forward, everything, c))
            for c in alternatives(inner, outer, backward=False)
        },
        exact,
        LIMIT,
        deadline,
    )
    gemm = median_us(lambda: torch.addmm(bias, x, w1.T))
    print(
        f"fwd {rows}x{inner}x{outer}: floors {byte_floor:.1f}/{flop_floor:.1f} cuBLAS {gemm:.1f} "
        f"with gelu {time_of(pair, 'pair'):.1f} | {ranking(times, 3)}"
    )

    gprime = random(rows, outer)
    exact = gelu_backward_reference(dy[head].double() @ w2.double(), gprime[head].double())

    def backward(r: slice, config: GemmConfig) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_gelu_backward(dy[r], w2, gprime[r], config=config)

    def unfused_backward(r: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return gelu_backward(dy[r] @ w2, gprime[r], in_place=True)

    pair = sweep(
        {"pair": (lambda: unfused_backward(head), lambda: unfused_backward(everything))},
        exact,
        2 * LIMIT,
        deadline,
    )
    times = sweep(
        {
            name(c): (functools.partial(backward, head, c), functools.partial(backward, everything, c))
            for c in alternatives(inner, outer, backward=True)
        },
        exact,
        LIMIT,
        deadline,
    )
    gemm = median_us(lambda: dy @ w2)
    print(
        f"bwd {rows}x{inner}x{outer}: floors {byte_floor:.1f}/{flop_floor:.1f} cuBLAS {gemm:.1f} "
        f"with gelu {time_of(pair, 'pair'):.1f} | {ranking(times, 3)}"
    )


def run_elementwise(rows: int, outer: int, deadline: Deadline) -> None:
    """Print the elementwise kernels' lines for [rows, outer]."""
    h, da, gprime = (random(rows, outer) for _ in range(3))
    head, everything = slice(0, min(CHECK_ROWS, rows)), slice(0, rows)
    floor = 3 * h.numel() * 2 / BYTES_PER_US

    def forward(r: slice, block_rows: int, columns: int, warps: int) -> tuple[torch.Tensor, torch.Tensor]:
        return bias_gelu_forward(h[r], None, block_rows=block_rows, block_columns=columns, num_warps=warps)

    exact = bias_gelu_forward_reference(h[head].double(), None)
    tiles = [(16, 128, 4), (8, 128, 4), (16, 64, 4), (8, 256, 4), (32, 128, 4), (4, 128, 1), (32, 128, 8)]
    times = sweep(
        {
            f"{r}x{c}w{w}": (
                functools.partial(forward, head, r, c, w),
                functools.partial(forward, everything, r, c, w),
            )
            for r, c, w in tiles
        },
        exact,
        LIMIT,
        deadline,
    )
    print(f"gelu fwd {rows}x{outer}: floor {floor:.1f} | {ranking(times)}")

    def backward(
        r: slice, block_rows: int, warps: int, stages: int, programs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gelu_backward(
            da[r],
            gprime[r],
            block_rows=block_rows,
            num_warps=warps,
            num_stages=stages,
            programs_per_multiprocessor=programs,
        )

    exact = gelu_backward_reference(da[head].double(), gprime[head].double())
    schedules = [
        (16, 4, 3, 8),
        (16, 4, 1, 8),
        (32, 4, 1, 4),
        (32, 4, 3, 4),
        (16, 4, 2, 12),
        (8, 4, 4, 8),
        (32, 8, 3, 4),
    ]
    times = sweep(
        {
            f"r{r}w{w}s{s}p{p}": (
                functools.partial(backward, head, r, w, s, p),
                functools.partial(backward, everything, r, w, s, p),
            )
            for r, w, s, p in schedules
        },
        exact,
        LIMIT,
        deadline,
    )
    print(f"gelu bwd {rows}x{outer}: floor {floor:.1f} | {ranking(times)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55, help="stop timing alternatives after so long")
    parser.add_argument("--batch", type=int, default=128, help="samples")
    parser.add_argument("--model", choices=SHAPES, default="base")
    parser.add_argument("--elementwise", action="store_true", help="tiles of the elementwise kernels")
    options = parser.parse_args()
    deadline = Deadline(options.seconds)
    torch.manual_seed(0)
    print("microseconds, median, inputs not in L2; t: tensor maps, h: halves, e: early gelu', pN: persistent")
    for rows, inner in SHAPES[options.model]:
        if options.elementwise:
            run_elementwise(rows * options.batch, 4 * inner, deadline)
        else:
            run_fused(rows * options.batch, inner, 4 * inner, deadline)


if __name__ == "__main__":
    main()
