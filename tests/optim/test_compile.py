"""torch.compile(fullgraph=True): no graph break, the same numbers, few recompilations."""

from __future__ import annotations

import pytest
import torch

from hiera_optim import enable_stage_checkpointing, make_mae_mask

from .fair import assert_equal_runs, batch_for, classifier, distance, fast, mae, run


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny(name: str = "image", **changes):
    """Two stages and one decoder block: tracing is most of the time of these tests."""
    size = {"image": (32, 32), "line": (64,), "video": (4, 32, 32)}[name]
    unit = {"image": (2, 2), "line": (2,), "video": (1, 2, 2)}[name]
    small = {"stages": (1, 1), "q_pool": 1, "decoder_depth": 1, "input_size": size, "mask_unit_size": unit}
    return mae(name, **{**small, **changes})


class Counting:
    """A compiler backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@pytest.mark.parametrize("name", ["image", "line", "video"])
def test_forward_and_backward_in_one_graph(name: str) -> None:
    model = fast(tiny(name))
    x = batch_for(model)
    mask, keep_idx = make_mae_mask(model, 2, 0.5, "cpu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = run(model, x, 0.5, mask=mask, keep_idx=keep_idx)
    got = run(compiled, x, 0.5, mask=mask, keep_idx=keep_idx)
    got.gradients = {key.removeprefix("_orig_mod."): value for key, value in got.gradients.items()}
    assert_equal_runs(got, expected)


def test_the_mask_may_be_drawn_inside_the_graph() -> None:
    model = fast(tiny(drop_path_rate=0.5))
    x = batch_for(model, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ours, eager = run(compiled, x, 0.5), run(model, x, 0.5)
    assert torch.equal(ours.mask, eager.mask)
    assert distance(ours.loss, eager.loss) < 1e-6


def test_a_mask_alone_must_keep_what_the_ratio_says() -> None:
    model = fast(tiny())
    x = batch_for(model)
    mask = make_mae_mask(model, 2, 0.5, "cpu")[0]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(compiled(x, 0.5, mask=mask)[0], model(x, mask=mask)[0]) < 1e-6
    with pytest.raises(RuntimeError, match="needs mask_ratio's count: 8 of 16 units"):
        compiled(x, 0.5, mask=~torch.zeros_like(mask))


@pytest.mark.parametrize("backend", ["math"])
def test_pinned_backends_compile(backend: str) -> None:
    model = fast(tiny(), sdpa_backend=backend)
    x = batch_for(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(run(compiled, x).loss, run(model, x).loss) < 1e-6


def test_checkpointed_stages_compile() -> None:
    model = fast(tiny())
    x = batch_for(model)
    expected = run(model, x)
    enable_stage_checkpointing(model, "all", decoder=True)
    got = run(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    got.gradients = {key.removeprefix("_orig_mod."): value for key, value in got.gradients.items()}
    assert_equal_runs(got, expected)


def test_autocast_outside_the_graph() -> None:
    model = fast(tiny())
    x = batch_for(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = run(compiled, x), run(model, x)
    assert ours.loss.dtype == torch.float32
    assert distance(ours.loss, eager.loss) < 1e-3


def test_classifiers_compile() -> None:
    model = fast(classifier(stages=(1, 1), mask_unit_size=(2, 2), q_pool=1, input_size=(32, 32)))
    x = batch_for(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(compiled(x), model(x)) < 1e-5
    keep_idx = torch.tensor([[0, 2], [1, 3]])
    ours, eager = compiled(x, None, True, keep_idx=keep_idx), model(x, None, True, keep_idx=keep_idx)
    assert all(distance(a, b) < 1e-5 for a, b in zip(ours[1], eager[1], strict=True))


def test_recompilations_are_the_shapes_and_modes_and_no_more() -> None:
    """A partial batch and an evaluation each compile once; going back and forth compiles nothing."""
    model = fast(tiny())
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    x = batch_for(model, 4)
    for _ in range(3):
        compiled.train()
        compiled(x)
        compiled(x[:3])
        compiled.eval()
        compiled(x)
    assert backend.graphs == 3


def test_other_masks_and_step_inputs_reuse_the_graph() -> None:
    from hiera_optim import MAEStepInputs

    model = fast(tiny())
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    inputs = MAEStepInputs(compiled, 2, 3, (32, 32), 0.5, "cpu", dtype=torch.float32)
    losses = set()
    for seed in range(4):
        inputs.x.copy_(batch_for(model, seed=seed))
        inputs.refresh_mask()
        losses.add(compiled(inputs.x, 0.5, mask=inputs.mask, keep_idx=inputs.keep_idx)[0].item())
    assert backend.graphs == 1
    assert len(losses) == 4


@pytest.mark.slow
def test_inductor_gives_the_same_numbers() -> None:
    model = fast(tiny())
    x = batch_for(model)
    expected = run(model, x, 0.5)
    got = run(torch.compile(model, fullgraph=True), x, 0.5, mask=expected.mask)
    got.gradients = {key.removeprefix("_orig_mod."): value for key, value in got.gradients.items()}
    assert_equal_runs(got, expected)
