"""The optimised MAE against FAIR's own code: loss, predictions, labels, masks and every gradient."""

from __future__ import annotations

import pytest
import torch

from hiera_optim import Geometry, encoder
from hiera_optim.encoder import embed_all, run_blocks

from .fair import (
    MODELS,
    WITH_FAIR_LOSS,
    Outcome,
    assert_equal_runs,
    batch_for,
    distance,
    fast,
    mae,
    run,
    worst_gradient,
)


@pytest.mark.parametrize("name", WITH_FAIR_LOSS)
def test_equal_in_fp32(name: str) -> None:
    model = mae(name)
    x = batch_for(model, 3)
    assert_equal_runs(run(fast(model), x, 0.6), run(model, x, 0.6))


@pytest.mark.parametrize("ratio", [0.5, 0.75])
@pytest.mark.parametrize("name", ["wide-8-channels", "video"])
def test_equal_at_other_ratios_with_a_given_mask(name: str, ratio: float) -> None:
    model = mae(name)
    x = batch_for(model)
    mask = model.get_random_mask(x, ratio)
    ours = run(fast(model), x, mask=mask)
    assert_equal_runs(ours, run(model, x, mask=mask))
    assert ours.mask is mask


@pytest.mark.parametrize("train", [True, False])
def test_stochastic_depth_draws_as_fair_does(train: bool) -> None:
    model = mae("drop-path").train(train)
    x = batch_for(model, 8)
    ours, fairs = run(fast(model), x, 0.5), run(model, x, 0.5)
    assert_equal_runs(ours, fairs)
    # The draw matters in training and is absent in evaluation.
    plain = mae("drop-path", drop_path_rate=0.0).train(train)
    plain.load_state_dict(model.state_dict())
    assert (distance(run(plain, x, 0.5).loss, fairs.loss) > 1e-6) is train


def test_stochastic_depth_drops_whole_samples_at_the_given_rate() -> None:
    """One draw a sample and branch, not one a mask unit, and another each time."""
    from hiera_optim.compat import DropPath
    from hiera_optim.encoder import drop_path

    torch.manual_seed(0)
    module = DropPath(0.25)
    scale = drop_path(module, torch.ones(4000, 3, 2, 5))
    assert torch.equal(scale, scale[:, :1, :1, :1].expand_as(scale))
    kept = scale[:, 0, 0, 0] > 0
    assert abs(kept.float().mean() - 0.75) < 5 * 0.0069
    assert torch.allclose(scale[kept], torch.tensor(1 / 0.75))
    again = drop_path(module, torch.ones(4000, 3, 2, 5))[:, 0, 0, 0] > 0
    assert abs(torch.corrcoef(torch.stack([kept, again]).float())[0, 1]) < 5 / 4000**0.5


def test_our_drop_path_and_mlp_are_timms(recwarn: pytest.WarningsRecorder) -> None:
    layers = pytest.importorskip("timm.layers")
    from hiera_optim.compat import DropPath, Mlp

    x = torch.randn(6, 5, 4)
    torch.manual_seed(0)
    expected = layers.DropPath(0.5)(x)
    torch.manual_seed(0)
    assert torch.equal(DropPath(0.5)(x), expected)
    theirs, ours = layers.Mlp(4, 8), Mlp(4, 8)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))


def against_float64(name: str, prepare, context, x_dtype: torch.dtype, seed: int) -> tuple[Outcome, Outcome, Outcome]:
    """(ours, FAIR's, FAIR's in float64) on the same weights and input, both rounded as `prepare` does."""
    model = prepare(mae(name))
    x = batch_for(model, 3, seed=seed).to(x_dtype)
    torch.manual_seed(seed)
    mask = model.get_random_mask(x, 0.5)
    exact = run(mae(name).double(), x.double(), mask=mask)
    with context():
        ours, fairs = run(fast(model), x, mask=mask), run(model, x, mask=mask)
    return ours, fairs, exact


def autocast(dtype: torch.dtype):
    return lambda: torch.autocast("cpu", dtype)


CASES = {
    "bf16 autocast": (lambda m: m, autocast(torch.bfloat16), torch.float32),
    "fp16 autocast": (lambda m: m, autocast(torch.float16), torch.float32),
    "pure bf16": (lambda m: m.bfloat16(), torch.enable_grad, torch.bfloat16),
}


@pytest.mark.parametrize("name", ["image", "video", "wide-8-channels"])
@pytest.mark.parametrize("case", CASES)
def test_no_further_from_float64_than_fair_in_half_precision(name: str, case: str) -> None:
    errors: dict[str, list[float]] = {"ours": [], "fairs": [], "our pred": [], "fair pred": []}
    for seed in range(4):
        ours, fairs, exact = against_float64(name, *CASES[case], seed)
        assert ours.loss.dtype == torch.float32
        assert ours.label.dtype == torch.float32
        assert ours.pred.dtype == fairs.pred.dtype
        assert distance(ours.label, exact.label) < 1e-6
        assert distance(ours.loss, exact.loss) < 4e-3
        names = exact.gradients.keys()
        flat = [torch.cat([o.gradients[n].double().flatten() for n in names]) for o in (ours, fairs, exact)]
        errors["ours"].append(distance(flat[0], flat[2]))
        errors["fairs"].append(distance(flat[1], flat[2]))
        errors["our pred"].append(distance(ours.pred, exact.pred))
        errors["fair pred"].append(distance(fairs.pred, exact.pred))
    mean = {key: sum(values) / len(values) for key, values in errors.items()}
    assert mean["ours"] < 1.3 * mean["fairs"]
    assert mean["our pred"] < 1.2 * mean["fair pred"]


def test_exact_in_float64() -> None:
    model = mae("image").double()
    x = batch_for(model).double()
    assert_equal_runs(run(fast(model), x), run(model, x), 1e-13, 1e-11)


def test_bf16_model_takes_a_float32_input_and_labels_keep_its_precision() -> None:
    """The label of a float32 input is exact although the model computes in bfloat16."""
    model = mae("image")
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    exact = model(x, mask=mask)[2]
    loss, pred, label, _ = fast(mae("image").bfloat16())(x, mask=mask)
    assert pred.dtype == torch.bfloat16
    assert loss.dtype == label.dtype == torch.float32
    assert torch.equal(label, exact)


def test_ties_of_the_pooling_send_the_gradient_where_fair_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 ties are common; here every pooled group is one, as all tokens are equal."""
    model = mae("q_pool-3").eval()
    geom = Geometry.from_model(model)
    with torch.no_grad():
        model.pos_embed.zero_()
        model.patch_embed.proj.weight.zero_()
    x = batch_for(model)
    grown = torch.randn(2, 4, 1, 64)

    def pos_gradient(tokens: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((tokens * grown.view(2, -1, 64)).sum(), model.pos_embed)
        return gradient

    def fairs() -> torch.Tensor:
        tokens = model.unroll(model.patch_embed(x) + model.get_pos_embed())
        for block in model.blocks:
            tokens = block(tokens)
        return tokens

    ours = run_blocks(model.blocks, embed_all(model, geom, x), (None,) * 5, (4,))[0].flatten(1, 2)
    expected = pos_gradient(fairs())
    assert distance(pos_gradient(ours), expected) < 1e-5
    # amax spreads the gradient over a tie: this test would see it.
    monkeypatch.setattr(encoder, "pool_max", lambda t, dim, stride: t.unflatten(dim, (-1, stride)).amax(dim + 1))
    spread = run_blocks(model.blocks, embed_all(model, geom, x), (None,) * 5, (4,))[0].flatten(1, 2)
    assert distance(pos_gradient(spread), expected) > 1e-2


def test_a_nan_pixel_that_is_seen_reaches_the_loss() -> None:
    model = mae()
    x = batch_for(model)
    x[0, 0, 0, 0] = float("nan")
    assert torch.isnan(fast(model)(x)[0])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["image", "line"])
def test_accumulated_gradients_are_those_of_the_whole_batch(name: str, count: int) -> None:
    """Without graphs; the captured step has its own test."""
    model = fast(mae(name))
    x = batch_for(model, 4)
    mask = model.get_random_mask(x, 0.5)
    whole = run(model, x, mask=mask).gradients
    model.zero_grad(set_to_none=True)
    for part, part_mask in zip(x.chunk(count), mask.chunk(count), strict=True):
        (model(part, mask=part_mask)[0] / count).backward()
    parts = {n: p.grad for n, p in model.named_parameters()}
    assert worst_gradient(parts, whole) < (1e-5, "")


@pytest.mark.parametrize("name", MODELS)
def test_input_gradients_are_fairs(name: str) -> None:
    model = mae(name).eval()
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    got = []
    for candidate in (fast(model), model):
        leaf = x.clone().requires_grad_()
        candidate.forward_encoder(leaf, 0.5, mask=mask)[0].square().sum().backward()
        got.append(leaf.grad)
    assert distance(got[0], got[1]) < 1e-5
