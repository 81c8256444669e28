"""The plan that shares matrices over ranks, and the iteration's singular values."""

from __future__ import annotations

import random

import pytest
import torch

from hiera_optim.optim.newton_schulz import Matrix, _iterate, flops, make_plan, newton_schulz


def random_matrices(seed: int) -> list[Matrix]:
    generator, offset, matrices = random.Random(seed), 0, []
    for _ in range(40):
        rows, cols = generator.choice([(8, 24), (24, 8), (16, 16), (7, 33), (64, 64), (96, 64)])
        matrices.append(Matrix(offset, rows, cols))
        offset += rows * cols
    return matrices


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("merge_flops", [0.0, 1e6, 1e12])
def test_plan_places_every_matrix_once_without_overlap(ranks: int, merge_flops: float) -> None:
    matrices = random_matrices(ranks)
    plan = make_plan(matrices, ranks, merge_flops)
    taken = torch.zeros(ranks, plan.chunk, dtype=torch.int64)
    for matrix, place in zip(matrices, plan.placements, strict=True):
        rows, cols = min(matrix.rows, matrix.cols), max(matrix.rows, matrix.cols)
        assert cols <= place.width
        assert place.start % 8 == 0
        assert place.width % 8 == 0
        for r in range(rows):
            taken[place.rank, place.start + r * place.width : place.start + r * place.width + cols] += 1
    assert taken.max() == 1
    for rank, batches in enumerate(plan.batches):
        covered = sum(batch.view(taken[rank]).sum() for batch in batches)
        assert covered == taken[rank].sum()
        assert all(batch.rows <= batch.cols for batch in batches)


def test_padded_shapes_and_so_results_do_not_depend_on_the_ranks() -> None:
    matrices = random_matrices(0)
    one, eight = make_plan(matrices, 1, 1e6), make_plan(matrices, 8, 1e6)
    assert [p.width for p in one.placements] == [p.width for p in eight.placements]


def test_merging_pads_only_where_it_is_worth_it() -> None:
    matrices = [Matrix(0, 8, 24), Matrix(192, 16, 16), Matrix(448, 512, 2048)]
    plans = [make_plan(matrices, 1, merge_flops) for merge_flops in (0.0, 1e6, 1e13)]
    shapes = [sorted((batch.rows, batch.cols) for batch in plan.batches[0]) for plan in plans]
    assert shapes == [[(8, 24), (16, 16), (512, 2048)], [(16, 24), (512, 2048)], [(512, 2048)]]


def test_ranks_get_about_equal_work() -> None:
    # Hiera Base's global-attention stage and decoder, most of its work.
    block = [(384, 384)] * 4 + [(1536, 384), (384, 1536)]
    decoder = [(512, 512)] * 4 + [(2048, 512), (512, 2048)]
    matrices = [Matrix(0, rows, cols) for rows, cols in block * 16 + decoder * 8]
    plan = make_plan(matrices, 8)
    work = [sum(b.count * flops(b.rows, b.cols) for b in batches) for batches in plan.batches]
    assert max(work) < 1.03 * sum(work) / 8


def orthogonalize(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    workspace = torch.full((2 * x.shape[0] * x.shape[1] ** 2,), torch.nan, dtype=x.dtype)
    newton_schulz(x.clone(), out, workspace, steps)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 24, 96), (1, 8, 200)])
def test_singular_values_come_near_one_and_directions_stay(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(shape[0], shape[1], shape[1], generator=generator))
    v, _ = torch.linalg.qr(torch.randn(shape[0], shape[2], shape[1], generator=generator))
    values = torch.logspace(0, -1.5, shape[1]).expand(shape[0], -1)
    x = (u * values[:, None, :] @ v.mT * 100).to(dtype)
    out = orthogonalize(x).float()
    singular = torch.linalg.svdvals(out)
    assert singular.min() > 0.5
    assert singular.max() < 1.5
    # U and V stay: U^T O V is diagonal.
    core = u.mT @ out @ v
    off_diagonal = core - torch.diag_embed(core.diagonal(dim1=1, dim2=2))
    assert off_diagonal.abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-3)


def test_equals_the_polynomial_of_the_singular_values_in_float64() -> None:
    x = torch.randn(1, 12, 30, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum(dim=1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(x).double(), u * s[:, None, :] @ vh, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_zero_rows_and_columns_change_nothing(steps: int) -> None:
    x = torch.randn(2, 10, 20, generator=torch.Generator().manual_seed(2))
    padded = torch.zeros(2, 16, 32)
    padded[:, :10, :20] = x
    out = orthogonalize(padded, steps)
    torch.testing.assert_close(out[:, :10, :20], orthogonalize(x, steps), rtol=1e-5, atol=1e-6)
    assert not out[:, 10:].any()
    assert not out[:, :, 20:].any()


def test_a_batch_at_once_equals_one_by_one() -> None:
    """The path of CUDA, on the CPU."""
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(3))
    start = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    out = torch.full_like(x, torch.nan)
    gram, poly = torch.full((2, 3, 16, 16), torch.nan)
    _iterate(start, out, gram, poly, 5)
    torch.testing.assert_close(out, orthogonalize(x), rtol=1e-5, atol=1e-6)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 8, 16)).any()
