"""Times LayerNorm with residual, forward and backward, against its byte floor and torch's own.

    python -m benchmarks.kernels.layer_norm [--seconds 55] [--batch 128] [--all]

Prints for each row length the floor, torch (add + layer_norm; its backward and the sums), our default and the
fastest alternatives. Nothing that differs from float64 is timed.
"""

from __future__ import annotations

import argparse
import functools

import torch
import triton
from torch.nn.functional import layer_norm as torch_layer_norm

from benchmarks.kernels.sweep import BYTES_PER_US, Deadline, median_us, ranking, sweep, time_of
from hiera_optim.ops.layer_norm import (
    RowConfig,
    add_layer_norm_backward,
    add_layer_norm_forward,
    backward_config,
    forward_config,
)
from hiera_optim.ops.layer_norm_reference import (
    add_layer_norm_backward_reference,
    add_layer_norm_forward_reference,
)

# Rows a sample and columns, mask ratio 0.6 at 224 x 224: Base's four stages and the decoder; then other
# models'.
SHAPES = [(1216, 96), (304, 192), (76, 384), (76, 768), (196, 512)]
OTHER_SHAPES = [(1216, 144), (1216, 256), (1216, 112), (76, 1024), (76, 1152), (76, 2048)]
CHECK_ROWS = 4096 + 16
EPS = 1e-6


def name(config: RowConfig) -> str:
    return f"r{config.rows}w{config.num_warps}s{config.num_stages}p{config.programs_per_multiprocessor}"


def forward_alternatives(columns: int) -> list[RowConfig]:
    block = triton.next_power_of_2(columns)
    tiles = [(2048, 4), (4096, 4), (8192, 8), (1024, 1), (2048, 2)]
    configs = [RowConfig(max(1, tile // block), warps, 1, 0) for tile, warps in tiles if tile >= block]
    configs += [RowConfig(max(1, 4096 // block), 4, 3, 4), RowConfig(max(1, 2048 // block), 4, 3, 8)]
    return list(dict.fromkeys([forward_config(columns), *configs]))


def backward_alternatives(columns: int) -> list[RowConfig]:
    block = triton.next_power_of_2(columns)
    tiles = [
        (2048, 4, 2, 4),
        (2048, 4, 1, 4),
        (2048, 4, 3, 4),
        (1024, 2, 3, 8),
        (4096, 8, 2, 2),
        (4096, 4, 1, 2),
    ]
    tiles += [(1024, 4, 3, 8), (512, 1, 3, 16)]
    configs = [RowConfig(max(1, tile // block), w, s, p) for tile, w, s, p in tiles if tile >= block]
    return list(dict.fromkeys([backward_config(columns), *configs]))


def run_shape(rows: int, columns: int, deadline: Deadline) -> None:
    """Print forward's and backward's lines for [rows, columns] in bf16."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, delta, grad_y, grad_s = (random(rows, columns) for _ in range(4))
    weight, bias = random(columns), random(columns)
    head = slice(0, min(CHECK_ROWS, rows))
    forward = (None, 1, weight, bias, EPS, torch.bfloat16)
    exact = add_layer_norm_forward_reference(
        x[head].double(), delta[head].double(), None, 1, weight.double(), bias.double(), EPS, torch.float64
    )

    def forward_call(r: slice, config: RowConfig) -> tuple[torch.Tensor, ...]:
        return add_layer_norm_forward(x[r], delta[r], *forward, config=config)

    everything = slice(0, rows)
    times = sweep(
        {
            name(c): (
                functools.partial(forward_call, head, c),
                functools.partial(forward_call, everything, c),
            )
            for c in forward_alternatives(columns)
        },
        exact,
        # y comes from s as rounded to bf16, which costs y two roundings against the unrounded reference.
        5e-3,
        deadline,
    )
    eager = median_us(lambda: torch_layer_norm(x + delta, (columns,), weight, bias, EPS))
    floor = 4 * x.numel() * 2 / BYTES_PER_US
    default = time_of(times, name(forward_config(columns)))
    print(f"fwd {rows}x{columns}: floor {floor:.1f} torch {eager:.1f} default {default:.1f} | {ranking(times)}")

    s, _, mean, rstd = add_layer_norm_forward(x, delta, *forward)
    exact_s, exact_mean, exact_rstd = (t[head].double() for t in (s, mean, rstd))
    exact_backward = add_layer_norm_backward_reference(
        grad_y[head].double(),
        grad_s[head].double(),
        exact_s,
        exact_mean,
        exact_rstd,
        weight.double(),
        None,
        1,
    )[:4]

    def backward_call(r: slice, config: RowConfig) -> tuple[torch.Tensor, ...]:
        out = add_layer_norm_backward(grad_y[r], grad_s[r], s[r], mean[r], rstd[r], weight, None, 1, config=config)
        return out[:4]  # type: ignore[return-value]

    times = sweep(
        {
            name(c): (
                functools.partial(backward_call, head, c),
                functools.partial(backward_call, everything, c),
            )
            for c in backward_alternatives(columns)
        },
        exact_backward,
        3e-3,
        deadline,
    )

    _, its_mean, its_rstd = torch.native_layer_norm(s, [columns], weight, bias, EPS)

    def eager_backward() -> None:
        grad, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_y, s, [columns], its_mean, its_rstd, weight, bias, [True, True, True]
        )
        (grad + grad_s).sum(0)

    eager = median_us(eager_backward)
    default = time_of(times, name(backward_config(columns)))
    print(f"bwd {rows}x{columns}: floor {floor:.1f} torch {eager:.1f} default {default:.1f} | {ranking(times)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55, help="stop timing alternatives after so long")
    parser.add_argument("--batch", type=int, default=128, help="samples")
    parser.add_argument("--all", action="store_true", help="also the row lengths of Large, Huge and Base-plus")
    options = parser.parse_args()
    deadline = Deadline(options.seconds)
    torch.manual_seed(0)
    print("microseconds, median, inputs not in L2; r: rows, w: warps, s: stages, p: programs a multiprocessor")
    for rows, columns in SHAPES + (OTHER_SHAPES if options.all else []):
        run_shape(rows * options.batch, columns, deadline)


if __name__ == "__main__":
    main()
