"""How the attention kernels are tiled, by shape and by GPU. Everything here changes speed only.

Methods. `rows`: one block of queries, whole softmax rows. `blocks`: several blocks of queries, keys and the
accumulators of dk and dv on chip. `streamed`: loops over blocks of keys (attention_long.py). Backward only:
`key_rows`, at most 64 keys, with keys as rows (attention_key_rows.py), and `phases`, dq and dk, dv by programs
of their own (attention_phases.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from hiera_optim.ops._launch import capability, ceil_div, multiprocessors

MAX_TOKENS = 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Shared memory a program may ask for, bytes, by compute capability (CUDA programming guide, table 27).
SHARED_MEMORY = {
    (0, 0): 227 << 10,  # the interpreter
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
}
SHARED_MEMORY_SMALLEST = 99 << 10  # 8.6, 8.9, 12.x


@dataclass(frozen=True)
class AttentionConfig:
    """Tiling of one kernel.

    windows: windows packed into a tile.
    block_m: query rows handled at once.
    key_block, key_round: largest block of keys; keys of a tile are padded to a multiple of key_round.
    num_stages: buffers of the loop over tiles (rows, blocks) or over keys (streamed); 1 loads when needed.
    programs_per_sm: programs a multiprocessor that share the tiles; 0 is one program a tile.
    max_registers: cap of registers a thread (Triton's maxnreg), None for the compiler's choice.
    streamed, key_rows, phases: the method; `rows` or `blocks` if none is set.
    """

    windows: int = 1
    block_m: int = 64
    key_block: int = 64
    key_round: int = 16
    num_warps: int = 4
    num_stages: int = 1
    programs_per_sm: int = 0
    max_registers: int | None = None
    streamed: bool = False
    key_rows: bool = False
    phases: bool = False


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n and 16 (the least extent of a dot)."""
    return max(16, 1 << (n - 1).bit_length())


def shared_memory_limit(compute_capability: tuple[int, int]) -> int:
    """Bytes of shared memory one program may use."""
    return SHARED_MEMORY.get(compute_capability, SHARED_MEMORY_SMALLEST)


def shared_memory(config: AttentionConfig, tokens: int, dim: int, element_size: int, backward: bool) -> int:
    """Upper estimate of a program's shared memory: operands twice where both wgmma and mma read them."""
    keys = ceil_div(config.windows * tokens, config.key_round) * config.key_round
    if config.key_rows:
        return element_size * ceil_div(dim, 16) * 16 * (keys + config.block_m) * 2 * (config.num_stages + 1)
    if config.streamed:
        keys = config.key_block * max(1, config.num_stages)
    width = ceil_div(dim, 16) * 16
    rows = config.block_m
    operands = 2 * keys * width + rows * width * (3 if backward else 1)
    if not config.streamed:
        operands *= config.num_stages
    weights = rows * min(keys, 256) * (2 if backward else 0)
    return element_size * (operands + weights)


def _packed(tokens: int, groups: int, heads: int, multiprocessors: int) -> int:
    """Windows in a tile of 64 token rows, fewer where that would leave multiprocessors idle."""
    rows = 64
    while rows > 16 and groups * heads * tokens // rows < 2 * multiprocessors:
        rows //= 2
    return max(1, rows // tokens)


def forward_config(
    groups: int, tokens: int, heads: int, dim: int, q_stride: int, dtype: torch.dtype, device: torch.device
) -> AttentionConfig:
    """Tiling of the forward kernel for qkv [groups, tokens, 3, heads, dim] on `device`."""
    chip = capability(device), multiprocessors(device)
    return choose(groups, tokens, heads, dim, q_stride, dtype.itemsize, *chip, backward=False)


def backward_config(
    groups: int, tokens: int, heads: int, dim: int, q_stride: int, dtype: torch.dtype, device: torch.device
) -> AttentionConfig:
    """Tiling of the backward kernel; arguments as `forward_config`."""
    chip = capability(device), multiprocessors(device)
    return choose(groups, tokens, heads, dim, q_stride, dtype.itemsize, *chip, backward=True)


@lru_cache(maxsize=256)
def choose(
    groups: int,
    tokens: int,
    heads: int,
    dim: int,
    q_stride: int,
    element_size: int,
    compute_capability: tuple[int, int],
    num_multiprocessors: int,
    *,
    backward: bool,
) -> AttentionConfig:
    """Tiling for a shape on a chip: keys on chip where registers and shared memory allow, else streamed."""
    limit = shared_memory_limit(compute_capability)
    # Without wgmma or tcgen05 operands sit in registers too: more than 64 tokens spill backward (sm_89: 280 bytes at
    # 196 x 32, 3.7 KB at 76 x 96).
    few_registers = compute_capability[0] not in (0, 9, 10)
    # Blackwell's accumulators live in tensor memory, 512 columns a multiprocessor: 76 x 96 would take 672 of them.
    streams_backward = backward and tokens > 64 and (few_registers or compute_capability[0] == 10)
    config = None
    if backward and compute_capability[0] in (0, 9) and element_size == 2:
        config = _backward_with_wgmma(groups, tokens, heads, dim, q_stride, num_multiprocessors)
    if config is None:
        config = _resident(groups, tokens, heads, dim, q_stride, element_size, num_multiprocessors, backward)
    if (
        config is not None
        and not streams_backward
        and shared_memory(config, tokens, dim, element_size, backward) <= limit
    ):
        return config
    config = AttentionConfig(streamed=True, num_stages=2)
    if element_size == 4 or (few_registers and backward and dim > 64):
        config = replace(config, block_m=32, key_block=32, num_stages=1)
    if shared_memory(config, tokens, dim, element_size, backward) > limit:
        config = replace(config, num_stages=1)
    return config


def _backward_with_wgmma(
    groups: int, tokens: int, heads: int, dim: int, q_stride: int, num_multiprocessors: int
) -> AttentionConfig | None:
    """Tiling of the backward methods made for warpgroup products, or None where they do not apply or spill."""
    queries = tokens // q_stride
    windows = _packed(tokens, groups, heads, num_multiprocessors)
    if windows * tokens == 64 and dim <= 96:
        if q_stride == 1:
            return AttentionConfig(windows=windows, num_stages=2, programs_per_sm=2, key_rows=True)
        if windows * queries <= 16 and dim % 32 in (0, 24):  # with a tail of 16 in the head dim: 400 bytes spilled
            return AttentionConfig(
                windows=windows, block_m=16, num_stages=2, programs_per_sm=3, max_registers=168, key_rows=True
            )
    if 128 < tokens <= 208 and q_stride == 1 and dim <= 32:
        return AttentionConfig(max_registers=128, phases=True)
    if 64 < tokens <= 128 and queries > 64 and dim % 32 == 0:
        return AttentionConfig(block_m=64)
    return None


def _resident(
    groups: int,
    tokens: int,
    heads: int,
    dim: int,
    q_stride: int,
    element_size: int,
    num_multiprocessors: int,
    backward: bool,
) -> AttentionConfig | None:
    """Tiling that keeps all keys on chip, or None where that would spill registers on Hopper."""
    queries = tokens // q_stride
    if element_size == 4:  # fp32 products are loops of FMA over registers: small tiles only
        return AttentionConfig(block_m=power_of_two(queries)) if tokens <= 32 else None
    if tokens <= 64:
        windows = _packed(tokens, groups, heads, num_multiprocessors)
        rows = windows * queries
        # Blocks of 16 pooled rows go through the older mma; head dims with a tail of 16 spill there (72: 8
        # bytes).
        block_m = 64 if q_stride > 1 and rows <= 64 and dim % 32 and tokens > 8 else power_of_two(rows)
        config = AttentionConfig(windows=windows, block_m=block_m, num_warps=4 if windows * tokens > 32 else 2)
        if not backward and element_size == 2 and windows * tokens == 64 and (windows > 1 or q_stride > 1):
            config = replace(config, num_stages=2, programs_per_sm=8)
        return config
    if tokens <= 128:
        if not backward:
            return AttentionConfig(block_m=min(64, power_of_two(queries)), key_block=128, max_registers=128)
        return AttentionConfig(block_m=power_of_two(queries), num_warps=8 if queries > 64 else 4)
    if tokens <= (208 if backward else 256) and dim <= (32 if backward else 64):
        return AttentionConfig(block_m=min(64, power_of_two(queries)), key_block=64 if backward else 128)
    return None
