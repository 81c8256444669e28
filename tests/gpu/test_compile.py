"""The public forward under torch.compile(fullgraph=True) on the GPU, in default mode and over CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiera_optim import MAEStepInputs, enable_stage_checkpointing, make_mae_mask

from .models import batch_for, distance, fast_model, gradients

with warnings.catch_warnings():  # the compiler imports much that warns, and says that it would rather have TF32
    warnings.simplefilter("ignore")
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BATCH = 4
MODES = ["default", "reduce-overhead"]
BF16_NOISE = 5e-3
"""Inductor fuses the few operations between ours and rounds once where eager rounds twice."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, mode: str) -> Any:
    return torch.compile(model, fullgraph=True, dynamic=False, mode=mode)


def static_inputs(model: nn.Module, batch: int = BATCH, ratio: float = 0.6) -> MAEStepInputs:
    size = model._hiera_state.geom.input_size  # type: ignore[union-attr]
    inputs = MAEStepInputs(model, batch, 3, size, ratio, "cuda", generator=torch.Generator("cuda").manual_seed(0))  # type: ignore[arg-type]
    inputs.x.copy_(batch_for(model, batch))
    return inputs


def forward(model: Any, inputs: MAEStepInputs) -> Any:
    return model(inputs.x, mask_ratio=inputs.mask_ratio, mask=inputs.mask, keep_idx=inputs.keep_idx)


def persistent_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["2d", "1d", "3d", "autocast", "fp32", "checkpointed"])
def test_equals_eager(kind: str, mode: str) -> None:
    size = {"1d": (512,), "3d": (4, 64, 64)}.get(kind, (128, 128))
    model = fast_model(torch.bfloat16 if kind not in ("autocast", "fp32") else torch.float32, size)
    inputs = static_inputs(model)
    if kind == "checkpointed":
        enable_stage_checkpointing(model, "all", decoder=True)
    program = compiled(model, mode)
    for _ in range(4):  # warm-up, recording, replays
        inputs.refresh_mask()
        results = []
        for each in (model, program):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                loss, pred, label, _ = forward(each, inputs)
            loss.backward()
            results.append([loss.detach().clone(), pred.detach().clone(), label.clone(), gradients(model)])
        (loss, pred, label, gradient), got = results
        assert distance(got[0], loss) < 1e-3
        assert distance(got[1], pred) < BF16_NOISE
        assert distance(got[2], label) < 1e-5
        assert distance(got[3], gradient) < BF16_NOISE
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("mode", MODES)
def test_stochastic_depth_draws_anew_at_every_call(mode: str) -> None:
    model = fast_model(drop_path_rate=0.5)
    inputs = static_inputs(model)
    program = compiled(model, mode)
    with torch.no_grad():
        losses = [forward(program, inputs)[0].item() for _ in range(8)]
        assert len(set(losses)) == 8
        model.eval()
        assert len({forward(program, inputs)[0].item() for _ in range(3)}) == 1


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulated_gradients_are_those_of_eager(accumulation: int) -> None:
    """With gradients that stay: autograd would keep the graph's own output, which the next replay overwrites."""
    model = fast_model()
    eager = copy.deepcopy(model)
    inputs = static_inputs(model)
    program = compiled(model, "reduce-overhead")
    persistent_gradients(model)
    persistent_gradients(eager)
    for step in range(4):
        for each in (model, eager):
            each.zero_grad(set_to_none=False)
        for micro in range(accumulation):
            inputs.x.copy_(batch_for(model, BATCH, seed=10 * step + micro))
            inputs.refresh_mask()
            torch.compiler.cudagraph_mark_step_begin()
            for each in (program, eager):
                (forward(each, inputs)[0] / accumulation).backward()
        assert distance(gradients(model), gradients(eager)) < BF16_NOISE


def test_train_and_evaluate_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs, each recorded once, however often they alternate; memory stays flat."""
    recorded = [0]
    record = cudagraph_trees.CUDAGraphNode.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        recorded[0] += 1
        record(self, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "__init__", counting)
    model = fast_model()
    inputs = static_inputs(model)
    program = compiled(model, "reduce-overhead")
    seen = []
    for _ in range(3):
        model.train()
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            inputs.refresh_mask()
            forward(program, inputs)[0].backward()
            model.zero_grad(set_to_none=True)
        model.eval()
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                forward(program, inputs)
        torch.cuda.synchronize()
        seen.append((counters["stats"]["unique_graphs"], recorded[0], torch.cuda.memory_reserved()))
    print("graphs, recordings, reserved bytes after each round:", seen)
    assert seen[0][0] == 2
    assert seen[2][1] <= 6  # forward and backward of training, forward of evaluation, each at most twice
    assert seen[1] == seen[2]


def test_a_smaller_batch_and_another_ratio_cost_a_graph_each_and_no_more() -> None:
    model = fast_model()
    program = compiled(model, "default")
    kinds = [static_inputs(model), static_inputs(model, batch=3), static_inputs(model, ratio=0.75)]
    for _ in range(3):
        for inputs in kinds:
            model.zero_grad(set_to_none=True)
            forward(program, inputs)[0].backward()
            got = gradients(model)
            model.zero_grad(set_to_none=True)
            forward(model, inputs)[0].backward()
            assert distance(got, gradients(model)) < BF16_NOISE
    assert counters["stats"]["unique_graphs"] == 3


def test_masks_drawn_by_the_forward() -> None:
    model = fast_model()
    x = batch_for(model, BATCH).bfloat16()
    program = compiled(model, "reduce-overhead")
    masks = [program(x, mask_ratio=0.5)[3].clone() for _ in range(4)]
    kept = make_mae_mask(model, BATCH, 0.5, "cuda")[0].sum(1)
    assert all(torch.equal(mask.sum(1), kept) for mask in masks)
    assert not torch.equal(masks[2], masks[3])
    assert isinstance(masks[0], Tensor)
