"""Times short-sequence attention, forward and backward, against its byte floor and flash SDPA.

    python -m benchmarks.kernels.attention [--seconds 45] [--batch 128] [--all] [--wide] [--only 196x16]

Prints for each shape the floor, flash, our default and the fastest alternatives. Nothing that differs from float64 is
timed. Labels: W windows a tile, m query rows, k largest key block (r: padded to), w warps, s stages, p programs an SM,
c register cap, L streamed.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.sweep import BYTES_PER_US, Deadline, median_us, ranking, sweep, time_of
from hiera_optim.ops.attention import attention_backward, attention_forward, attention_forward_lse
from hiera_optim.ops.attention_config import AttentionConfig, backward_config, forward_config, power_of_two
from hiera_optim.ops.attention_reference import attention_backward_reference, attention_forward_reference

# Windows a sample, tokens, heads, head dim, q_stride, layers a step. Base at 224 x 224, mask ratio 0.6, 8 channels;
# the decoder first: it weighs most.
SHAPES = [
    (1, 196, 16, 32, 1, 8),
    (1, 76, 4, 96, 1, 15),
    (19, 64, 1, 96, 1, 2),
    (19, 16, 2, 96, 1, 2),
    (19, 64, 2, 96, 4, 1),
    (19, 16, 4, 96, 4, 1),
    (1, 76, 8, 96, 1, 3),
]
# Large, Huge, the 1-D configuration, q_pool 1 and 3.
OTHER_SHAPES = [
    (1, 76, 8, 72, 1, 0),
    (19, 64, 2, 72, 1, 0),
    (1, 76, 16, 64, 1, 0),
    (3, 8, 1, 96, 1, 0),
    (3, 8, 2, 96, 2, 0),
    (1, 24, 4, 96, 1, 0),
    (1, 304, 2, 96, 1, 0),
    (1, 784, 16, 32, 1, 0),
    (1, 19, 8, 96, 1, 0),
    (1, 49, 16, 32, 1, 0),
]
CHECK_WINDOWS = 17
DEVICE = torch.device("cuda")
Shape = tuple[int, int, int, int, int]


def name(config: AttentionConfig) -> str:
    streamed = "L" if config.streamed else f"W{config.windows}"
    cap = f"c{config.max_registers}" if config.max_registers else ""
    rounded = f"r{config.key_round}" if config.key_round != 16 else ""
    return (
        f"{streamed}m{config.block_m}k{config.key_block}{rounded}w{config.num_warps}s{config.num_stages}"
        f"p{config.programs_per_sm}{cap}"
    )


def _distinct(default: AttentionConfig, others: list[AttentionConfig]) -> list[AttentionConfig]:
    return list(dict.fromkeys([default, *others]))


def _windows(shape: Shape, rows: int) -> AttentionConfig:
    _, tokens, _, _, q_stride = shape
    windows = max(1, rows // tokens)
    block = power_of_two(windows * tokens // q_stride)
    return AttentionConfig(windows=windows, block_m=block, num_warps=4 if windows * tokens > 32 else 2)


def forward_alternatives(shape: Shape, default: AttentionConfig, wide: bool) -> list[AttentionConfig]:
    """Tilings worth timing for a shape; `wide`: also the unlikely ones."""
    _, tokens, _, _, q_stride = shape
    if tokens <= 64:
        others = [replace(default, programs_per_sm=4), replace(default, programs_per_sm=2, num_stages=2)]
        others += [_windows(shape, rows) for rows in ((16, 32, 64, 128) if wide else (32, 128))]
        if q_stride > 1:
            others += [replace(default, block_m=64), replace(default, num_warps=2)]
        return _distinct(default, others)
    long = AttentionConfig(streamed=True)
    others = [long, replace(long, num_stages=2), replace(long, block_m=128, num_warps=8)]
    if wide:
        others += [replace(long, key_block=128), replace(long, block_m=128), replace(long, block_m=32)]
    if tokens <= 256:
        whole = AttentionConfig(key_block=128)
        others += [whole, replace(whole, max_registers=128), replace(whole, block_m=128, num_warps=8)]
        if wide:
            others += [
                replace(whole, programs_per_sm=3),
                replace(whole, max_registers=168),
                replace(whole, key_block=64),
                replace(whole, key_block=256, key_round=64),
                replace(whole, block_m=128, num_warps=8, max_registers=128),
                replace(whole, num_warps=8),
            ]
    return _distinct(default, others)


def backward_alternatives(shape: Shape, default: AttentionConfig, wide: bool) -> list[AttentionConfig]:
    """Tilings worth timing for a shape; `wide`: also the unlikely ones."""
    _, tokens, _, dim, q_stride = shape
    if tokens <= 64:
        others = [replace(default, programs_per_sm=3), replace(default, programs_per_sm=2, num_stages=2)]
        others += [_windows(shape, rows) for rows in ((16, 32, 64) if wide else (32,))]
        others.append(replace(default, max_registers=128))
        if wide or q_stride > 1:
            others.append(replace(default, num_warps=8))
        return _distinct(default, others)
    long = AttentionConfig(streamed=True)
    others = [long, replace(long, num_stages=2), replace(long, block_m=32)]
    if wide:
        others += [
            replace(long, block_m=32, num_stages=2),
            replace(long, max_registers=168),
            replace(long, block_m=128, num_warps=8),
            replace(long, block_m=128, key_block=128, num_warps=8),
        ]
    # The accumulators of dk and dv of more than 256 x 32 keys do not fit registers.
    if tokens * dim <= 256 * 32:
        blocks = AttentionConfig()
        eight = replace(blocks, block_m=128, num_warps=8)
        others += [blocks, eight, replace(eight, key_block=128, key_round=128), replace(blocks, key_round=64)]
        if wide:
            others += [
                replace(blocks, num_warps=8),
                replace(blocks, key_block=128),
                replace(eight, max_registers=128),
                replace(eight, key_round=64, max_registers=128),
                replace(blocks, max_registers=168),
                replace(blocks, programs_per_sm=2),
            ]
    return _distinct(default, others)


def flash_us(qkv: torch.Tensor, grad_o: torch.Tensor, q_stride: int) -> tuple[float, float]:
    """Microseconds of flash SDPA forward and backward (with the copies of packing); NaN where it does not apply."""

    def heads(packed: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
        if q_stride > 1:
            q = q.reshape(*q.shape[:2], -1, q_stride, q.shape[3]).amax(3)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            with torch.no_grad():
                forward = median_us(lambda: heads(qkv))
            leaf = qkv.clone().requires_grad_()
            o = heads(leaf)
            return forward, median_us(lambda: torch.autograd.grad(o, leaf, grad_o, retain_graph=True))
    except RuntimeError:
        return float("nan"), float("nan")


def run_shape(shape: Shape, deadline: Deadline, wide: bool) -> tuple[float, float]:
    """Print forward's and backward's lines; returns the default's microseconds."""
    groups, tokens, heads, dim, q_stride = shape
    qkv = torch.randn(groups, tokens, 3, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    grad_o = torch.randn(groups, tokens // q_stride, heads * dim, device=DEVICE, dtype=torch.bfloat16)
    few, everything = slice(0, min(groups, CHECK_WINDOWS)), slice(0, groups)
    exact = attention_forward_reference(qkv[few].double(), q_stride)
    exact_dqkv, exact_dbias = attention_backward_reference(grad_o[few].double(), qkv[few].double(), q_stride)
    flash_forward, flash_backward = flash_us(qkv, grad_o, q_stride)
    label = f"{groups}x{tokens}x{heads}x{dim}" + (f"/{q_stride}" if q_stride > 1 else "")

    def forward_call(r: slice, config: AttentionConfig) -> tuple[torch.Tensor, ...]:
        return (attention_forward(qkv[r], q_stride, config=config),)

    default = forward_config(*shape, torch.bfloat16, DEVICE)
    times = sweep(
        {
            name(c): (functools.partial(forward_call, few, c), functools.partial(forward_call, everything, c))
            for c in ([default] if deadline.passed() else forward_alternatives(shape, default, wide))
        },
        (exact,),
        5e-3,
        deadline,
    )
    forward_us = time_of(times, name(default))
    floor = (qkv.numel() + grad_o.numel()) * 2 / BYTES_PER_US
    print(f"fwd {label}: floor {floor:.1f} flash {flash_forward:.1f} default {forward_us:.1f} | {ranking(times, 5)}")

    o, lse = attention_forward_lse(qkv, q_stride)

    def backward_call(r: slice, config: AttentionConfig) -> tuple[torch.Tensor, ...]:
        return attention_backward(grad_o[r], qkv[r], q_stride, o[r], lse[r], config=config)

    default = backward_config(*shape, torch.bfloat16, DEVICE)
    times = sweep(
        {
            name(c): (functools.partial(backward_call, few, c), functools.partial(backward_call, everything, c))
            for c in ([default] if deadline.passed() else backward_alternatives(shape, default, wide))
        },
        (exact_dqkv, exact_dbias),
        8e-3,
        deadline,
    )
    backward_us = time_of(times, name(default))
    floor = (2 * qkv.numel() + grad_o.numel()) * 2 / BYTES_PER_US
    print(
        f"bwd {label}: floor {floor:.1f} flash {flash_backward:.1f} default {backward_us:.1f} | {ranking(times, 6)}",
        flush=True,
    )
    return forward_us, backward_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45, help="start no more alternatives after so long")
    parser.add_argument("--batch", type=int, default=128, help="samples")
    parser.add_argument("--all", action="store_true", help="also Large, Huge, 1-D, other q_pool")
    parser.add_argument("--only", default="", help="shapes whose TxHxD contains this")
    parser.add_argument("--wide", action="store_true", help="more alternatives (takes minutes to compile)")
    options = parser.parse_args()
    deadline = Deadline(options.seconds)
    torch.manual_seed(0)
    print("microseconds, median, inputs not in L2")
    total_forward = total_backward = 0.0
    for windows, tokens, heads, dim, q_stride, layers in SHAPES + (OTHER_SHAPES if options.all else []):
        if options.only not in f"{tokens}x{heads}x{dim}":
            continue
        try:
            forward, backward = run_shape(
                (windows * options.batch, tokens, heads, dim, q_stride), deadline, options.wide
            )
        except Exception as error:  # noqa: BLE001 - one shape's failure must not hide the others
            print(f"{tokens}x{heads}x{dim}/{q_stride}: {type(error).__name__}: {str(error)[:200]}")
            continue
        total_forward += layers * forward
        total_backward += layers * backward
    print(f"a step of Base, defaults: forward {total_forward / 1e3:.2f} ms, backward {total_backward / 1e3:.2f} ms")


if __name__ == "__main__":
    main()
