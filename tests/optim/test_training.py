"""TrainStep on the CPU: precision of the labels, errors in the middle of a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hiera_optim import Geometry, enable_stage_checkpointing
from hiera_optim.mae import masked_loss
from hiera_optim.masks import sample_mask, sample_noise
from hiera_optim.optim import AdamW
from hiera_optim.training import TrainStep

from .fair import batch_for, distance, fast, mae

IDS = torch.arange(2)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, AdamW, TrainStep]:
    model = fast(mae("image").to(dtype))
    optimizer = AdamW(model.named_parameters(), lr=1e-2, no_decay=(), master=True)
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return model, optimizer, TrainStep(model, optimizer, micro_batch=2, precision=precision, **options)


def test_labels_have_the_precision_of_the_input() -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model, _, step = make(torch.bfloat16)
        geom = Geometry.from_model(model)
        x = batch_for(model)
        masks = sample_mask(IDS, geom.num_mask_units, geom.num_kept_for_loss(0.6), 0)
        with torch.no_grad():
            want = masked_loss(model, geom, x.to(dtype), *masks)
        assert torch.equal(step.evaluate(x.to(dtype), IDS), want.float())
        report = step(x.to(dtype), IDS)
        assert report is not None
        assert torch.equal(report.loss, want.float())
        losses.append(want)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_error_ends_the_step_and_the_next_call_starts_another(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, step = make(accumulation=accumulation)
    _, expected, untroubled = make(accumulation=accumulation)
    x = batch_for(model)
    loss = step._loss
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = loss(*args)
        if calls == accumulation:
            result.register_hook(lambda _: 1 / 0)
        return result

    monkeypatch.setattr(step, "_loss", failing)
    with pytest.raises(ZeroDivisionError):
        for _ in range(accumulation):
            step(x, IDS)
    for each in (step, untroubled):
        reports = [each(x, IDS) for _ in range(accumulation)]
        assert [report is None for report in reports] == [True] * (accumulation - 1) + [False]
    assert distance(optimizer.params.flat, expected.params.flat) == 0.0


def test_a_batch_of_another_shape_is_named() -> None:
    model, _, step = make()
    with pytest.raises(ValueError, match=r"takes x \(2, 3, 64, 64\).*not \(3, 3, 64, 64\) and \(3,\)"):
        step(batch_for(model, 3), torch.arange(3))


def test_an_unknown_precision_is_named() -> None:
    model = fast(mae("image"))
    with pytest.raises(ValueError, match="precision must be fp32 or bf16, not 'fp16'"):
        TrainStep(model, AdamW(model.named_parameters(), lr=1e-2), micro_batch=2, precision="fp16")


class Scale(torch.nn.Module):
    """Multiplies its first call by scales[0] and its second by scales[1], sample by sample."""

    def __init__(self, scales: torch.Tensor) -> None:
        super().__init__()
        self.scales, self.calls = scales, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scales[(self.calls - 1) % 2].view(-1, 1, 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_stochastic_depth_is_the_samples_own_and_what_fairs_blocks_make_of_it(recompute: bool) -> None:
    """The step's loss and gradient against FAIR's code with the factors of the same hash, in any order and batch."""
    ids = torch.tensor([5, 0, 9, 2])
    plain = mae("drop-path")
    model = fast(plain)
    if recompute:
        enable_stage_checkpointing(model, "all")
    x, geom = batch_for(model, 4), Geometry.from_model(model)
    optimizer = AdamW(model.named_parameters(), lr=0.0, no_decay=())
    step = TrainStep(model, optimizer, micro_batch=4, seed=3)
    keep = torch.tensor([1 - float(getattr(b.drop_path, "drop_prob", 0.0)) for b in plain.blocks]).repeat_interleave(2)
    scales = (sample_noise(ids, len(keep), 3) < keep).float() / keep
    for i, block in enumerate(plain.blocks):
        block.drop_path = Scale(scales[:, 2 * i : 2 * i + 2].t())
    mask = sample_mask(ids, geom.num_mask_units, geom.num_kept_for_loss(0.6), 3)[0]
    want = plain.train()(x, 0.6, mask=mask)[0]
    report = step(x, ids)
    assert report is not None
    torch.testing.assert_close(report.loss, want.detach())
    want.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    torch.testing.assert_close(report.grad_norm, norm, rtol=1e-4, atol=0)
    torch.manual_seed(1)  # no generator has a say
    losses = []
    for half in (ids[:2], ids[2:]):
        rows = (ids[:, None] == half).any(1)
        half_step = TrainStep(model, optimizer, micro_batch=2, seed=3)
        output = half_step(x[rows], ids[rows])
        assert output is not None
        losses.append(output.loss.clone())
    torch.testing.assert_close(torch.stack(losses).mean(), want.detach())
    assert step.evaluate(x, ids) != want


def test_a_model_with_methods_of_its_own_draws_stochastic_depth_from_the_global_generator() -> None:
    plain = mae("drop-path")

    class Own(type(plain)):  # type: ignore[misc]
        def forward_decoder(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_decoder(*args, **kwargs)

    plain.__class__ = Own
    model = fast(plain).train()
    step = TrainStep(model, AdamW(model.named_parameters(), lr=0.0, no_decay=()), micro_batch=4)
    x, losses = batch_for(model, 4), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        report = step(x, torch.arange(4))
        assert report is not None
        losses.append(report.loss.clone())
    assert losses[0] == losses[1] != losses[2]
    # without stochastic depth nothing is drawn: the masks are the sample ids'
    assert step.evaluate(x, torch.arange(4)) == step.evaluate(x, torch.arange(4))


def test_a_step_that_is_dropped_frees_its_buffers_and_hooks() -> None:
    """Hooks on parameters are out of the garbage collector's sight: what they hold is held for ever."""
    model, optimizer, step = make()
    parameter = next(model.parameters())
    assert step(batch_for(model), IDS) is not None
    assert len(parameter._post_accumulate_grad_hooks) == 1
    gone = weakref.ref(optimizer), weakref.ref(step)
    del optimizer, step
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert not parameter._post_accumulate_grad_hooks
