"""TrainStep on the GPU: what is captured equals what is eager, step by step and over fifty steps."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hiera_optim import enable_stage_checkpointing, fast, tables
from hiera_optim.encoder import drop_path_scales, keep_probabilities
from hiera_optim.masks import sample_mask, sample_noise

from .models import batch_for, distance, fast_model, no_synchronisation, train, trainer

pytestmark = pytest.mark.gpu


def ids_of(step: int, batch: int = 4) -> Tensor:
    return torch.arange(step * batch, (step + 1) * batch, device="cuda")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_fifty_captured_steps_are_fifty_eager_ones(kind: str) -> None:
    """Bit for bit where cuBLAS chooses alike; bounded by what the order of the samples in a batch changes."""
    captured, eager, permuted = trainer(kind=kind), trainer(kind=kind, capture=False), trainer(kind=kind, capture=False)
    losses = [train(run, 50) for run in (captured, eager)]
    train(permuted, 50, order=torch.tensor([2, 0, 3, 1], device="cuda"))
    noise = distance(permuted.movement, eager.movement)
    apart = distance(captured.movement, eager.movement)
    print(f"{kind}: captured against eager {apart:.2e}, order of samples {noise:.2e}")
    assert captured.optimizer.step_count.item() == 50
    assert losses[1][0] > losses[1][-1]
    # Muon gives every direction the same step, so also those that are rounding alone
    assert noise < (0.5 if kind == "muon" else 0.2)
    assert apart <= 1.5 * noise
    assert distance(torch.stack(losses[0]), torch.stack(losses[1])) < 1e-2


@pytest.mark.parametrize("capture", [False, True])
def test_accumulation_is_one_batch(capture: bool) -> None:
    parts = trainer(micro_batch=4, accumulation=4, capture=capture)
    whole, permuted = trainer(micro_batch=16, capture=capture), trainer(micro_batch=16, capture=capture)
    losses = [train(run, 6) for run in (parts, whole)]
    train(permuted, 6, order=torch.randperm(16, generator=torch.Generator().manual_seed(0)).cuda())
    assert distance(torch.stack(losses[0]), torch.stack(losses[1])) < 1e-3
    noise = distance(permuted.movement, whole.movement)
    assert distance(parts.movement, whole.movement) < max(2 * noise, 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulation_without_a_float32_sum(dtype: torch.dtype) -> None:
    """The fused backward adds to the gradient in place."""
    options: dict[str, Any] = {"accumulation": 2, "dtype": dtype, "fp32_accumulation": False}
    captured, eager = (trainer(capture=capture, **options) for capture in (True, False))
    whole = trainer(micro_batch=8, capture=False, dtype=dtype)
    losses = [train(run, 5) for run in (captured, eager, whole)]
    assert distance(torch.stack(losses[0]), torch.stack(losses[1])) < 1e-3
    assert distance(torch.stack(losses[0]), torch.stack(losses[2])) < 1e-3
    assert distance(captured.movement, eager.movement) < 1e-2
    assert distance(captured.movement, whole.movement) < 0.1


def test_stochastic_depth_is_a_function_of_the_sample_ids() -> None:
    """Replayed from a graph too: a learning rate of 0 keeps the weights, so the loss depends on the draws alone."""
    run = trainer(lr=0.0, drop_path_rate=0.5)
    x = batch_for(run.model, 4)
    g = run.step.geometry
    probability = tables.keep_probabilities(tuple(keep_probabilities(run.model)), x.device)
    seen = []
    for step in (0, 1, 2, 3, 1):
        ids = ids_of(step)
        report = run.step(x, ids)
        assert report is not None
        mask, keep_idx, drop_idx = sample_mask(ids, g.num_mask_units, g.num_kept_for_loss(0.6), 0)
        noise = sample_noise(ids, len(probability), 0).t()
        with torch.no_grad():
            scales = drop_path_scales(probability, noise)
            want = fast.mae_loss(run.model, g, x, mask, keep_idx, drop_idx, scales)[0]
            without = fast.mae_loss(run.model, g, x, mask, keep_idx, drop_idx)[0]
        assert torch.equal(report.loss, want)
        assert want != without
        seen.append(want.item())
    assert seen[1] == seen[4]
    assert len(set(seen)) == 4


def test_evaluation_between_steps_changes_nothing() -> None:
    undisturbed, run = trainer(drop_path_rate=0.2), trainer(drop_path_rate=0.2)
    train(undisturbed, 6)
    x = batch_for(run.model, 7, seed=99)
    for i in range(6):
        before = run.weights.clone()
        first = run.step.evaluate(x, ids_of(9, 7)).clone()
        assert torch.equal(first, run.step.evaluate(x, ids_of(9, 7)))
        assert torch.equal(before, run.weights)
        assert run.model.training
        train(run, 1, first=i)
        assert not torch.equal(first, run.step.evaluate(x, ids_of(9, 7)))
    assert torch.equal(run.weights, undisturbed.weights)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_wrong_shape_is_named_and_does_no_harm(accumulation: int) -> None:
    undisturbed, run = trainer(accumulation=accumulation), trainer(accumulation=accumulation)
    train(undisturbed, 2)
    train(run, 1)
    with pytest.raises(ValueError, match=r"takes x \(4, 3, 128, 128\) .*not \(3, 3, 128, 128\).*new TrainStep"):
        run.step(batch_for(run.model, 3), ids_of(0, 3))
    train(run, 1, first=1)
    assert torch.equal(run.weights, undisturbed.weights)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_error_in_the_step_leaves_a_usable_object(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first warm-up, in a later one, and while the graph is recorded."""
    undisturbed, run = trainer(), trainer()
    train(undisturbed, 3)
    loss, calls = run.step._loss, 0

    def failing(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        result = loss(*args)
        if calls == at:
            result.register_hook(lambda _: 1 / 0)
        return result

    monkeypatch.setattr(run.step, "_loss", failing)
    with pytest.raises(ZeroDivisionError):
        train(run, 1)
    assert torch.equal(run.weights, run.start)
    train(run, 3)
    assert torch.equal(run.weights, undisturbed.weights)


def test_other_threads_may_pin_memory_while_the_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the threads do that read the next batches; the allocator then also asks for the events of older copies."""
    run = trainer()
    loss, pinned = run.step._loss, []

    def pin() -> None:
        for _ in range(4):
            host = torch.empty(1 << 20, pin_memory=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                host.cuda(non_blocking=True)
            pinned.append(host.is_pinned())
            del host

    def pinning(*args: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            with ThreadPoolExecutor(1) as executor:
                executor.submit(pin).result()
        return loss(*args)

    monkeypatch.setattr(run.step, "_loss", pinning)
    losses = train(run, 5)
    assert pinned == [True] * 4
    assert losses[-1] < losses[0]


def test_the_learning_rate_acts_in_the_recorded_step() -> None:
    run = trainer(lr=0.0)
    train(run, 2)
    assert torch.equal(run.weights, run.start)
    run.optimizer.lr.fill_(1e-3)
    train(run, 1, first=2)
    assert not torch.equal(run.weights, run.start)


def test_release_gives_the_memory_back_and_the_step_goes_on() -> None:
    undisturbed, run = trainer(micro_batch=128), trainer(micro_batch=128)
    train(undisturbed, 3)
    undisturbed.step.release()
    before = reserved()
    train(run, 2)
    recorded = reserved()
    run.step.release()
    released = reserved()
    print(f"MiB reserved: {before >> 20} before, {recorded >> 20} with the graph, {released >> 20} after release")
    assert recorded - before > 256 << 20
    # cuBLAS keeps its workspaces: of the warm-up's stream and the capture's, of this thread and of autograd's
    assert released - before < 192 << 20
    train(run, 1, first=2)
    assert torch.equal(run.weights, undisturbed.weights)


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def peak(stages: Any, decoder: bool) -> tuple[int, Tensor]:
    """Bytes that capture and two replays need above the model and optimizer, and the weights then."""
    model = fast_model(size=(224, 224))
    if stages:
        enable_stage_checkpointing(model, stages, decoder=decoder)
    run = trainer(model=model, micro_batch=32)
    before = reserved()
    torch.cuda.reset_peak_memory_stats()
    train(run, 2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before, run.weights


def test_checkpointing_lowers_the_peak_under_capture() -> None:
    nothing, weights = peak((), False)
    encoder, with_encoder = peak("all", False)
    everything, with_everything = peak("all", True)
    print(f"MiB above model and optimizer: {nothing >> 20}, encoder {encoder >> 20}, and decoder {everything >> 20}")
    assert everything < encoder < nothing
    assert torch.equal(weights, with_encoder)
    assert torch.equal(weights, with_everything)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_host_synchronisation_in_a_step(kind: str, capture: bool) -> None:
    run = trainer(kind=kind, capture=capture, accumulation=2, drop_path_rate=0.2)
    train(run, 2)
    x = batch_for(run.model, 4).cpu().pin_memory()
    ids = ids_of(3).cpu().pin_memory()
    with no_synchronisation():
        for _ in range(4):
            run.step(x, ids)
            run.step.evaluate(x, ids)
            run.optimizer.lr.fill_(1e-4)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end")  # torch 2.11's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_math_attention_and_no_synchronisation_in_the_public_forward(dtype: torch.dtype) -> None:
    from hiera_optim import MAEStepInputs

    model = fast_model(dtype, drop_path_rate=0.2)
    inputs = MAEStepInputs(model, 4, 3, (128, 128), 0.6, "cuda", dtype=dtype)

    def step() -> None:
        loss = model(inputs.x, mask_ratio=0.6, mask=inputs.mask, keep_idx=inputs.keep_idx)[0]
        loss.backward()
        inputs.refresh_mask()

    step()
    step()
    with no_synchronisation():
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    names = {event.key for event in profiler.key_averages()}
    assert not any("_attention_math" in name for name in names)
    fused = any("hiera_optim::chain" in name for name in names)
    assert fused == (dtype == torch.bfloat16)
    assert any("_efficient_attention" in n or "_flash_attention" in n for n in names) == (dtype == torch.float32)


def test_float32_is_captured_too() -> None:
    captured, eager = (trainer(dtype=torch.float32, capture=capture) for capture in (True, False))
    train(captured, 5)
    train(eager, 5)
    assert distance(captured.movement, eager.movement) < 1e-3


def test_the_first_input_decides_the_precision_of_the_labels() -> None:
    run = trainer(lr=0.0)
    x = batch_for(run.model, 4)
    report = run.step(x, ids_of(0))
    assert report is not None
    wide = report.loss.item()
    assert wide == run.step.evaluate(x, ids_of(0)).item()
    narrow = run.step.evaluate(x.bfloat16(), ids_of(0)).item()
    assert wide != narrow
    assert abs(wide / narrow - 1) < 1e-2


def test_frozen_parameters_stay() -> None:
    model = fast_model()
    frozen = [model.blocks[0].mlp.fc1.weight, model.blocks[2].attn.proj.bias, model.pos_embed]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = copy.deepcopy(frozen)
    run = trainer(model=model)
    losses = train(run, 5)
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))


@pytest.mark.parametrize("size", [(512,), (4, 64, 64)])
def test_other_dimensionalities_are_captured(size: tuple[int, ...]) -> None:
    captured, eager = (trainer(size=size, capture=capture) for capture in (True, False))
    losses = train(captured, 5)
    train(eager, 5)
    assert losses[-1] < losses[0]
    assert distance(captured.movement, eager.movement) < 0.05
