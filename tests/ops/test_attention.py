"""Short-sequence attention against float64: output, gradient and column sums, odd shapes, ties, broken
kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hiera_optim.ops import attention
from hiera_optim.ops.attention import (
    attention_backward,
    attention_forward,
    attention_forward_lse,
    can_run,
    needs_lse,
)
from hiera_optim.ops.attention_blocks import head_dim_blocks, split_blocks
from hiera_optim.ops.attention_config import AttentionConfig, choose
from hiera_optim.ops.attention_reference import (
    attention_backward_reference,
    attention_forward_reference,
    pool_queries,
)
from tests.ops.kernel_testing import Mutant, assert_close, faithful_bf16, poison_empty, relative_error

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Rounding the output alone costs 1.6e-3 in bf16 and 2e-4 in fp16; P and dS are rounded once more.
FORWARD_LIMIT = {FP32: 2e-6, FP16: 6e-4, BF16: 4e-3}
BACKWARD_LIMIT = {FP32: 3e-6, FP16: 1e-3, BF16: 6e-3}
# Sums are fp32 of products of rounded operands.
SUM_LIMIT = {FP32: 5e-6, FP16: 1e-3, BF16: 6e-3}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    faithful_bf16(monkeypatch)


def _case(
    groups: int, tokens: int, heads: int, dim: int, q_stride: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv whose softmax is far from uniform, and a grad_o with a mean, so that column sums are not noise."""
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(groups, tokens, 3, heads, dim, generator=g)
    qkv[:, :, 0] *= 2
    grad_o = torch.randn(groups, tokens // q_stride, heads * dim, generator=g) + 0.25
    return qkv.to(dtype), grad_o.to(dtype)


def _check(
    groups: int,
    tokens: int,
    heads: int,
    dim: int,
    q_stride: int,
    dtype: torch.dtype,
    config: AttentionConfig | None = None,
) -> None:
    qkv, grad_o = _case(groups, tokens, heads, dim, q_stride, dtype)
    o = attention_forward(qkv, q_stride, config=config)
    assert o.dtype == dtype
    assert_close("o", o, attention_forward_reference(qkv.double(), q_stride), FORWARD_LIMIT[dtype])
    dqkv, dbias = attention_backward(grad_o, qkv, q_stride, config=config)
    exact_dqkv, exact_dbias = attention_backward_reference(grad_o.double(), qkv.double(), q_stride)
    assert dqkv.dtype == dtype
    assert dbias.dtype == FP32
    for i, name in enumerate(("dq", "dk", "dv")):
        if exact_dqkv[:, :, i].norm() > 1e-9:
            assert_close(name, dqkv[:, :, i], exact_dqkv[:, :, i], BACKWARD_LIMIT[dtype])
        else:  # one key: dq and dk are zero
            assert dqkv[:, :, i].double().norm() < 1e-2 * exact_dqkv.norm()
    q_sum, k_sum, v_sum = dbias.chunk(3)
    exact_q, exact_k, exact_v = exact_dbias.chunk(3)
    # dq cancels in its sums: error relative to the sum of magnitudes.
    magnitude = exact_dqkv[:, :, 0].abs().sum((0, 1)).flatten()
    assert bool(((q_sum - exact_q).abs() <= SUM_LIMIT[dtype] * magnitude + 1e-9).all())
    assert exact_k.abs().max() < 1e-9
    assert bool((k_sum == 0).all())
    assert_close("dbias of v", v_sum, exact_v, 5e-6)


# T = 1 and 3: the last stages of short signals; 5 and 6: tiles that do not fill; 64, 16: windows; 76, 196:
# Base.
@pytest.mark.parametrize(
    ("groups", "tokens", "heads", "dim", "q_stride"),
    [
        (7, 1, 1, 16, 1),
        (5, 3, 2, 32, 1),
        (20, 4, 1, 32, 1),
        (4, 6, 2, 40, 2),
        (5, 16, 1, 96, 1),
        (5, 16, 1, 72, 4),
        (3, 24, 1, 56, 1),
        (2, 64, 1, 96, 1),
        (1, 64, 2, 96, 4),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_against_float64(groups: int, tokens: int, heads: int, dim: int, q_stride: int, dtype: torch.dtype) -> None:
    _check(groups, tokens, heads, dim, q_stride, dtype)


@pytest.mark.parametrize(
    ("groups", "tokens", "heads", "dim", "q_stride"),
    [(1, 76, 2, 96, 1), (1, 76, 1, 72, 2), (1, 196, 1, 32, 1), (1, 136, 1, 32, 8), (1, 150, 1, 128, 2)],
)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_longer_sequences(groups: int, tokens: int, heads: int, dim: int, q_stride: int, dtype: torch.dtype) -> None:
    _check(groups, tokens, heads, dim, q_stride, dtype)


# Every method at a shape that its default would not take, several tiles a program, blocks that do not divide.
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((6, 16, 1, 96, 1), AttentionConfig(windows=4)),
        ((5, 16, 1, 72, 4), AttentionConfig(windows=4, block_m=16)),
        ((20, 4, 2, 32, 1), AttentionConfig(windows=16)),
        ((8, 10, 2, 32, 2), AttentionConfig(windows=3, block_m=16, programs_per_sm=1)),
        ((5, 12, 1, 48, 1), AttentionConfig(block_m=16, key_block=16, num_stages=2, programs_per_sm=1)),
        ((2, 40, 1, 32, 1), AttentionConfig(block_m=16, key_block=32)),
        ((2, 40, 2, 32, 4), AttentionConfig(streamed=True, block_m=16, key_block=16)),
        ((2, 50, 1, 96, 1), AttentionConfig(streamed=True, block_m=16, key_block=32, num_stages=2)),
        ((5, 16, 2, 40, 4), AttentionConfig(windows=4, block_m=16, programs_per_sm=1, key_rows=True)),
        ((3, 24, 2, 32, 1), AttentionConfig(block_m=32, num_stages=2, programs_per_sm=1, key_rows=True)),
        ((7, 10, 1, 32, 1), AttentionConfig(windows=3, block_m=32, key_rows=True)),
        ((2, 76, 2, 32, 1), AttentionConfig(phases=True)),
        ((1, 84, 2, 40, 1), AttentionConfig(phases=True, block_m=32)),
    ],
)
def test_every_method_gives_the_same(shape: tuple[int, int, int, int, int], config: AttentionConfig) -> None:
    _check(*shape, FP32, config)
    _check(*shape, BF16, config)


@pytest.mark.parametrize("tokens", [16, 64, 76, 196, 300])
def test_statistics_of_forward_serve_backward(tokens: int) -> None:
    qkv, grad_o = _case(1, tokens, 1, 32, 1, BF16)
    o, lse = attention_forward_lse(qkv)
    scores = torch.einsum("gthd,gshd->ghts", qkv[:, :, 0].double(), qkv[:, :, 1].double()) * 32**-0.5
    assert_close("lse", lse, scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64)), 1e-6)
    assert_close("o", o, attention_forward(qkv), 2e-3)
    given = attention_backward(grad_o, qkv, 1, o, lse)
    computed = attention_backward(grad_o, qkv, 1)
    for a, b in zip(given, computed, strict=True):
        assert torch.equal(a, b)
    assert needs_lse(tokens, 1, 32, 1, BF16) == (tokens > 16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("config", [None, AttentionConfig(streamed=True, block_m=16, key_block=16)])
def test_ties_go_to_the_first_token(dtype: torch.dtype, config: AttentionConfig | None) -> None:
    groups, tokens, heads, dim, q_stride = 3, 16, 1, 32, 4
    qkv, grad_o = _case(groups, tokens, heads, dim, q_stride, dtype, seed=1)
    qkv[:, :, 0] = torch.randint(0, 2, qkv[:, :, 0].shape).to(dtype)  # two values: nearly every group ties
    qkv[0, :, 0] = -1.5  # all equal, and below the zeros of masked rows
    dqkv, _ = attention_backward(grad_o, qkv, q_stride, config=config)
    exact, _ = attention_backward_reference(grad_o.double(), qkv.double(), q_stride)
    assert_close("dq", dqkv[:, :, 0], exact[:, :, 0], BACKWARD_LIMIT[dtype])
    assert bool((dqkv[0, :, 0].unflatten(0, (-1, q_stride))[:, 1:] == 0).all())
    assert_close("o", attention_forward(qkv, q_stride), attention_forward_reference(qkv.double(), q_stride), 4e-3)


def test_pooling_takes_the_first_maximum() -> None:
    q = torch.tensor([1.0, 3.0, 3.0, 2.0, -1.0, -1.0, -2.0, -1.0]).view(1, 8, 1, 1)
    values, winners = pool_queries(q, 4)
    assert values.flatten().tolist() == [3.0, -1.0]
    assert winners.flatten().tolist() == [1, 0]


def test_reference_agrees_with_sdpa() -> None:
    qkv, _ = _case(3, 12, 2, 24, 1, FP32)
    q, k, v = (t.transpose(1, 2).double() for t in qkv.unbind(2))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert_close("o", attention_forward_reference(qkv.double()), exact, 1e-12)


def test_repeats_bitwise() -> None:
    qkv, grad_o = _case(5, 16, 1, 32, 1, BF16)
    first, again = attention_backward(grad_o, qkv), attention_backward(grad_o, qkv)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_window() -> None:
    qkv = torch.zeros(0, 16, 3, 2, 32)
    assert attention_forward(qkv, 4).shape == (0, 4, 64)
    dqkv, dbias = attention_backward(torch.zeros(0, 4, 64), qkv, 4)
    assert dqkv.shape == qkv.shape
    assert bool((dbias == 0).all())


def test_large_scores_stay_finite() -> None:
    qkv, grad_o = _case(2, 76, 1, 32, 1, FP32)
    qkv[:, :, :2] *= 100
    assert_close("o", attention_forward(qkv), attention_forward_reference(qkv.double()), 2e-3)
    dqkv, _ = attention_backward(grad_o, qkv)
    assert bool(torch.isfinite(dqkv).all())


# One constant wrong in each: a launch that skips work or mixes windows.
MUTANTS: list[dict[str, Any]] = [
    {"SCALE": 0.2},
    {"WINDOWS": 1},
    {"KEYS": ((0, 16),)},
    {"DIMS": ((0, 16),)},
    {"Q_STRIDE": 4},
]


def _worst_errors() -> tuple[float, float]:
    config = AttentionConfig(windows=3, block_m=32)
    qkv, grad_o = _case(6, 20, 1, 32, 2, FP32)
    with np.errstate(all="ignore"):  # a broken kernel computes with poison
        o = attention_forward(qkv, 2, config=config)
        dqkv, dbias = attention_backward(grad_o, qkv, 2, config=config)
    exact, exact_bias = attention_backward_reference(grad_o.double(), qkv.double(), 2)
    forward = relative_error(o, attention_forward_reference(qkv.double(), 2))
    return forward, max(relative_error(dqkv, exact), relative_error(dbias, exact_bias))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: next(iter(m)))
def test_broken_kernels_are_caught(mutant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _worst_errors()
    assert max(forward, backward) < 1e-5
    for name in ("resident_forward", "resident_backward"):
        monkeypatch.setattr(attention, name, Mutant(getattr(attention, name), **mutant))
    forward, backward = _worst_errors()
    assert forward > 1e-3
    assert backward > 1e-3


def test_broken_streamed_kernels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, grad_o = _case(1, 40, 1, 32, 1, FP32)
    exact, _ = attention_backward_reference(grad_o.double(), qkv.double(), 1)
    config = AttentionConfig(streamed=True, block_m=16, key_block=16)
    for i, (name, mutant) in enumerate(
        (("long_backward_queries", {"SCALE": 0.2}), ("long_backward_keys", {"drop_programs": 1}))
    ):
        with monkeypatch.context() as patch:
            patch.setattr(attention, name, Mutant(getattr(attention, name), **mutant))
            dqkv, _ = attention_backward(grad_o, qkv, config=config)
        assert relative_error(dqkv[:, :, i], exact[:, :, i]) > 1e-3


@pytest.mark.parametrize(
    ("name", "config", "shape", "mutants"),
    [
        (
            "key_rows_backward",
            AttentionConfig(windows=3, block_m=32, key_rows=True),
            (7, 10, 1, 32, 1),
            ({"SCALE": 0.2}, {"WINDOWS": 1}, {"BLOCK_N": 16}, {"BLOCK_M": 16}, {"DIMS": ((0, 16),)}),
        ),
        (
            "phased_backward",
            AttentionConfig(phases=True, block_m=16),
            (1, 40, 1, 32, 1),
            ({"SCALE": 0.2}, {"BLOCKS": ((0, 32),)}, {"DIMS": ((0, 16),)}, {"drop_programs": 1}),
        ),
    ],
)
def test_broken_backward_kernels_are_caught(
    name: str,
    config: AttentionConfig,
    shape: tuple[int, int, int, int, int],
    mutants: tuple[dict[str, Any], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qkv, grad_o = _case(*shape, FP32)
    exact, exact_bias = attention_backward_reference(grad_o.double(), qkv.double(), 1)
    for mutant in ({}, *mutants):
        with monkeypatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(attention, name, Mutant(getattr(attention, name), **mutant))
            dqkv, dbias = attention_backward(grad_o, qkv, config=config)
        error = max(relative_error(dqkv, exact), relative_error(dbias, exact_bias))
        assert error > 1e-3 if mutant else error < 1e-5, mutant


def test_what_can_run() -> None:
    assert can_run(64, 1, 96, 4, BF16)
    assert can_run(784, 16, 32, 1, BF16)
    assert not can_run(1025, 1, 96, 1, BF16)
    assert not can_run(64, 1, 132, 1, BF16)
    assert not can_run(64, 1, 36, 1, BF16)
    assert not can_run(63, 1, 96, 4, BF16)
    assert not can_run(64, 1, 96, 1, torch.float64)
    with pytest.raises(ValueError, match="do not cover"):
        attention_forward(torch.zeros(1, 6, 3, 1, 32), 4)
    with pytest.raises(ValueError, match="contiguous"):
        attention_forward(torch.zeros(1, 6, 3, 32, 2).transpose(3, 4))
    with pytest.raises(ValueError, match="grad_o"):
        attention_backward(torch.zeros(1, 6, 64), torch.zeros(1, 6, 3, 1, 32))


def test_blocks_cover_without_overlap() -> None:
    assert split_blocks(196, 128) == ((0, 128), (128, 64), (192, 16))
    assert split_blocks(76, 64) == ((0, 64), (64, 16))
    assert split_blocks(76, 64, 64) == ((0, 64), (64, 64))
    assert [head_dim_blocks(d) for d in (32, 56, 72, 96, 128)] == [
        ((0, 32),),
        ((0, 64),),
        ((0, 64), (64, 16)),
        ((0, 64), (64, 32)),
        ((0, 128),),
    ]
    for extent in range(1, 260):
        blocks = split_blocks(extent, 64)
        assert [start for start, _ in blocks] == [sum(s for _, s in blocks[:i]) for i in range(len(blocks))]
        assert extent <= sum(size for _, size in blocks) < extent + 16


@pytest.mark.parametrize("chip", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_chip_has_a_tiling(chip: tuple[int, int]) -> None:
    small = choose(128, 76, 4, 96, 1, 2, chip, 100, backward=True)
    # only Hopper has both room for the accumulators and products that read them where they are
    assert small.streamed == (chip[0] != 9)
    for tokens in (1, 4, 16, 64, 76, 196, 784):
        for backward in (False, True):
            config = choose(128, tokens, 4, 96, 1, 2, chip, 100, backward=backward)
            assert config.streamed or config.windows * tokens <= 256
