"""Muon's packing and applying kernels in Triton's interpreter against their PyTorch oracles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hiera_optim.optim import Muon, muon_kernel, muon_parameters
from hiera_optim.optim.muon import apply_reference, pack_reference
from hiera_optim.optim.newton_schulz import Matrix, Plan, make_plan
from tests.ops.broken import broken_module

ALIGNED = [(16, 24), (72, 16), (64, 128), (136, 72), (16, 16), (8, 200)]
ODD = [(7, 33), (65, 3), (16, 24), (1, 70), (130, 129)]


def layout(shapes: list[tuple[int, int]]) -> tuple[list[Matrix], int]:
    """Matrices at offsets that are multiples of 256, with gaps between them, and the buffer's length."""
    matrices, offset = [], 0
    for rows, cols in shapes:
        matrices.append(Matrix(offset, rows, cols))
        offset += -(-rows * cols // 256) * 256 + 256
    return matrices, offset


def randn(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def covered(matrices: list[Matrix], numel: int) -> Tensor:
    mask = torch.zeros(numel, dtype=torch.bool)
    for matrix in matrices:
        mask[matrix.offset : matrix.end] = True
    return mask


def plan_of(matrices: list[Matrix], ranks: int) -> Plan:
    # Some shapes are padded together, others are not.
    return make_plan(matrices, ranks, merge_flops=2e6)


@pytest.mark.parametrize("shapes", [ALIGNED, ODD])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nesterov", "zero_grad", "scaled"), [(True, True, True), (False, False, False)])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_pack_equals_reference(
    shapes: list[tuple[int, int]],
    grad_dtype: torch.dtype,
    nesterov: bool,
    zero_grad: bool,
    scaled: bool,
    rank: int,
    ranks: int,
) -> None:
    matrices, numel = layout(shapes)
    plan = plan_of(matrices, ranks)
    tables = muon_kernel.make_tables(matrices, plan, rank, [1.0] * len(matrices), torch.device("cpu"))
    assert tables.aligned == (shapes is ALIGNED)
    inside = covered(matrices, numel)
    scale = torch.tensor(0.3) if scaled else None
    results = []
    for run in ("kernel", "reference"):
        grad, momentum = randn(numel, 0, grad_dtype), randn(numel, 1)
        grad[~inside] = math.nan
        momentum[~inside] = math.nan
        # What no matrix covers (padding, other ranks' places) must not be written.
        packed = torch.full((plan.chunk,), math.nan)
        if run == "kernel":
            muon_kernel.pack_triton(grad, momentum, packed, scale, tables, 0.95, nesterov, zero_grad)
        else:
            own = [p if p.rank == rank else None for p in plan.placements]
            pack_reference(grad, momentum, packed, scale, matrices, own, 0.95, nesterov, zero_grad)
        results.append((grad, momentum, packed))
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-6, atol=1e-6, equal_nan=True)
    grad, momentum, packed = results[0]
    assert (grad[inside] == 0).all() == zero_grad
    assert momentum[inside].isfinite().all()
    own_elements = sum(m.rows * m.cols for m, p in zip(matrices, plan.placements, strict=True) if p.rank == rank)
    assert packed.isfinite().sum() == own_elements


@pytest.mark.parametrize("shapes", [ALIGNED, ODD])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_apply_equals_reference(shapes: list[tuple[int, int]], dtype: torch.dtype, master: bool, ranks: int) -> None:
    matrices, numel = layout(shapes)
    plan = plan_of(matrices, ranks)
    factors = [0.5 + i for i in range(len(matrices))]
    tables = muon_kernel.make_tables(matrices, plan, 0, factors, torch.device("cpu"))
    inside = covered(matrices, numel)
    exchange = randn(ranks * plan.chunk, 2).view(ranks, plan.chunk)
    lr = torch.tensor(0.01)
    results = []
    for run in ("kernel", "reference"):
        weights = randn(numel, 3)
        weights[~inside] = math.nan
        param = weights.to(dtype)
        masters = weights.clone() if master else None
        if run == "kernel":
            muon_kernel.apply_triton(param, masters, exchange, lr, tables, 0.2)
        else:
            apply_reference(param, masters, exchange, lr, matrices, plan.placements, factors, 0.2)
        assert param[inside].isfinite().all()
        assert param[~inside].isnan().all()
        results.append((param, masters))
    (param, masters), (oracle, oracle_masters) = results
    # The interpreter cuts where the hardware rounds to bfloat16: one unit in the last place.
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(param, oracle, rtol=rtol, atol=1e-6, equal_nan=True)
    if masters is not None:
        torch.testing.assert_close(masters, oracle_masters, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert (masters - randn(numel, 3))[inside].abs().max() > 1e-2


def test_packed_then_applied_matrix_comes_back_at_its_own_place() -> None:
    """Packing and applying agree on places and on transposition."""
    matrices, numel = layout(ODD)
    plan = plan_of(matrices, 1)
    tables = muon_kernel.make_tables(matrices, plan, 0, [1.0] * len(matrices), torch.device("cpu"))
    grad = randn(numel, 5)
    momentum, packed = torch.zeros(numel), torch.zeros(1, plan.chunk)
    muon_kernel.pack_triton(grad, momentum, packed[0], None, tables, 0.0, True, False)
    param = torch.zeros(numel)
    muon_kernel.apply_triton(param, None, packed, torch.tensor(1.0), tables, 0.0)
    inside = covered(matrices, numel)
    torch.testing.assert_close(param[inside], -grad[inside])
    assert not param[~inside].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_step_by_kernels_equals_the_plain_one(dtype: torch.dtype) -> None:
    results = []
    for kernels in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 16)).to(dtype)
        names = muon_parameters(model)
        optimizer = Muon(model.named_parameters(), muon=names, lr=0.02, fp32_accumulation=True)
        if kernels:
            device = torch.device("cpu")
            optimizer._tables = muon_kernel.make_tables(
                optimizer.matrices, optimizer.plan, 0, optimizer.factors, device
            )
        for step in range(3):
            optimizer.params.flat_grad.copy_(randn(len(optimizer.params), step, dtype))
            optimizer.accumulate()
            optimizer.step(torch.tensor(0.5), zero_grad=True)
        results.append((optimizer.master_parameters(), optimizer.state_dict()))
    for ours, oracle in zip(*results, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], oracle[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("g + BETA * (m - g)", "g"),
        ("tl.load(fields + 6)", "tl.load(fields + 2)"),
        (
            "packed_ptr + place + c[:, None] * width + r[None, :]",
            "packed_ptr + place + r[:, None] * width + c[None, :]",
        ),
        ("(1.0 - BETA) * (g - m)", "BETA * (g - m)"),
    ],
)
def test_a_broken_kernel_is_caught(old: str, new: str) -> None:
    broken = broken_module("hiera_optim.optim.muon_kernel", old, new)
    # Square matrices of one shape: the exchanged strides stay inside the buffers.
    matrices, numel = layout([(72, 64), (64, 64), (40, 64)])
    plan = make_plan(matrices, 1, merge_flops=1e12)
    tables = muon_kernel.make_tables(matrices, plan, 0, [1.0] * 3, torch.device("cpu"))
    results = []
    for module in (muon_kernel, broken, None):
        grad, momentum, packed = randn(numel, 0), randn(numel, 1), torch.zeros(plan.chunk + 8192)
        if module is not None:
            module.pack_triton(grad, momentum, packed, None, tables, 0.9, True, False)
        else:
            pack_reference(grad, momentum, packed, None, matrices, list(plan.placements), 0.9, True, False)
        results.append(torch.cat([momentum, packed]))
    ours, wrong, oracle = results
    assert (ours - oracle).abs().max() < 1e-6
    assert (wrong - oracle).abs().max() > 1e-2
