"""Attention: 4-D for every block, the backend asked for, chunks, and the module swap on its own."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hiera_optim import (
    BACKEND_NAMES,
    MaskUnitAttentionFast,
    attention,
    optimize,
    recommended_backend,
    restore,
    swap_mask_unit_attention,
)

from .fair import assert_equal_runs, batch_for, classifier, distance, fast, hiera, mae, run

MATH = "aten::_scaled_dot_product_attention_math"
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def operators(model) -> dict[str, int]:
    x = batch_for(model)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(x)[0].sum().backward()
    return {event.key: event.count for event in recorded.key_averages()}


@pytest.mark.parametrize("name", ["image", "global-everywhere", "video", "line"])
def test_no_block_falls_to_the_math_kernel(name: str) -> None:
    seen = operators(fast(mae(name)))
    assert MATH not in seen
    assert seen[FUSED] == 7


def test_fair_itself_falls_to_the_math_kernel() -> None:
    assert operators(mae())[MATH] == 7


def test_nothing_depends_on_a_value_of_the_mask() -> None:
    model = fast(mae())
    x = batch_for(model)
    inputs = {"mask": None, "keep_idx": torch.tensor([[1], [2]])}
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(x, **inputs)[0].backward()
    seen = {event.key for event in recorded.key_averages()}
    assert not seen & {"aten::nonzero", "aten::index_put_", "aten::masked_select"}


def test_backends_by_name_by_callable_and_by_default() -> None:
    assert BACKEND_NAMES == ("cudnn", "flash", "mem_efficient", "math")
    model = mae()
    assert operators(fast(model, sdpa_backend="math"))[MATH] == 7
    seen = []

    def pick(index: int, block: torch.nn.Module) -> str | None:
        seen.append((index, type(block).__name__, block.attn.use_mask_unit_attn))
        return "math" if index in (0, 6) else None

    counted = operators(fast(model, sdpa_backend=pick))
    assert [index for index, _, _ in seen] == list(range(7))
    assert {name for _, name, _ in seen} == {"HieraBlock"}
    assert (counted[MATH], counted[FUSED]) == (2, 5)


@pytest.mark.parametrize("backend", [None, "auto", *BACKEND_NAMES])
@pytest.mark.parametrize("whole", [True, False])
def test_every_backend_gives_the_same_numbers(backend: str | None, whole: bool) -> None:
    model = mae()
    x = batch_for(model)
    assert_equal_runs(run(fast(model, sdpa_backend=backend, swap_gather=whole), x), run(model, x))


def test_recommended_backend() -> None:
    model = mae()
    pick = recommended_backend(model)
    names = [pick(i, block) for i, block in enumerate([*model.blocks, *model.decoder_blocks])]
    assert set(names) <= {None, *BACKEND_NAMES}
    assert "cudnn" not in names
    assert recommended_backend(model, compile_enabled=False) is None
    assert recommended_backend(torch.nn.Linear(1, 1)) is None


def test_many_windows_are_sent_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels take at most 65535 groups; 1-D models and large batches have more."""
    model = mae("line")
    x = batch_for(model, 4)
    expected = run(fast(model), x)
    monkeypatch.setattr(attention, "MAX_GROUPS", 3)
    counted = operators(fast(model))
    assert counted[FUSED] > 7
    assert_equal_runs(run(fast(model), x), expected)


@pytest.mark.parametrize(
    ("heads", "tokens", "head_dim", "most"),
    [(1, 4, 32, 65535), (1, 64, 96, 65535), (16, 196, 32, 16383), (1, 1, 8, 65535), (4096, 4096, 128, 1)],
)
def test_chunks_stay_inside_the_kernels_limits(heads: int, tokens: int, head_dim: int, most: int) -> None:
    assert attention.groups_per_call(heads, tokens, head_dim) == most
    padded = -(-tokens // 128) * 128
    assert most == 1 or most * heads * padded * max(head_dim, 32) < 1 << 31


def test_swapping_attention_alone() -> None:
    model = mae()
    x = batch_for(model)
    expected = run(model, x)
    names = [n for n, _ in model.named_parameters()]
    identities = [id(p) for p in model.parameters()]
    assert swap_mask_unit_attention(model, sdpa_backend="math") == 7
    assert swap_mask_unit_attention(model) == 0
    assert model.blocks[0].attn.sdpa_backend is None
    assert isinstance(model.blocks[0].attn, MaskUnitAttentionFast)
    assert isinstance(model.blocks[0].attn, hiera.MaskUnitAttention)
    assert type(model) is hiera.MaskedAutoencoderHiera
    assert [n for n, _ in model.named_parameters()] == names
    assert [id(p) for p in model.parameters()] == identities
    assert_equal_runs(run(model, x), expected)
    optimize(model, verbose=False)
    assert_equal_runs(run(model, x), expected)
    assert swap_mask_unit_attention(model, "math") == 7
    assert model._hiera_state.decoder_backends == ("math", "math")
    assert type(restore(model).blocks[0].attn) is hiera.MaskUnitAttention
    with pytest.raises(TypeError, match="not FAIR's Hiera"):
        swap_mask_unit_attention(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("q_stride", [1, 4])
def test_the_attention_module_on_its_own(windows: bool, q_stride: int) -> None:
    torch.manual_seed(0)
    arguments = (8, 16, 2, q_stride, 4, windows)
    theirs, ours = hiera.MaskUnitAttention(*arguments), MaskUnitAttentionFast(*arguments)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 32, 8)
    assert distance(ours(x), theirs(x)) < 1e-6
    with pytest.raises(ValueError, match="unknown sdpa_backend"):
        MaskUnitAttentionFast(8, 16, 2, sdpa_backend="fast")


def test_a_classifier_is_swapped_too() -> None:
    assert swap_mask_unit_attention(classifier()) == 5
