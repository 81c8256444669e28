"""The ways of use that hiera-optim publishes, each written anew and run on the CPU with a small model.

Basic and compiled training, captured-style training with static buffers, Muon-like manual optimisation with
accumulation, stage checkpointing, backends. Lightning has a file of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import hiera_optim
from hiera_optim import MAEStepInputs, enable_stage_checkpointing, optimize

from .fair import hiera, mae


def small(**changes):
    torch.manual_seed(0)
    return hiera.mae_hiera_tiny_224(pretrained=False, in_chans=8, input_size=(64, 64), decoder_depth=1, **changes)


def tiny(name: str = "image"):
    """Two stages, for torch.compile, whose tracing is most of a test's time."""
    return mae(name, stages=(1, 1), mask_unit_size=(2, 2), q_pool=1, decoder_depth=1, input_size=(32, 32))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_two_lines() -> None:
    model = small()
    optimize(model, verbose=False)
    loss, *_ = model(torch.randn(2, 8, 64, 64), mask_ratio=0.6)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_static_buffers_in_bf16_learn_under_compile() -> None:
    model = tiny().to("cpu", torch.bfloat16)
    optimize(model, graph_safe=True, verbose=False)
    model = torch.compile(model, backend="eager", dynamic=False)
    inputs = MAEStepInputs(
        model._orig_mod,
        batch_size=2,
        in_chans=3,
        input_size=(32, 32),
        mask_ratio=0.6,
        device="cpu",
        dtype=torch.bfloat16,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    batch = torch.linspace(-1, 1, 32).expand(2, 3, 32, 32)
    losses = []
    for _ in range(30):
        inputs.x.copy_(batch)
        inputs.refresh_mask()
        out = model(inputs.x, mask_ratio=0.6, mask=inputs.mask, keep_idx=inputs.keep_idx)
        out[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out[0].item())
    assert losses[-1] < 0.5 * losses[0]


def test_accumulation_with_muon() -> None:
    """What the published package calls broken: several backward passes, then one step of two optimizers."""
    model = optimize(tiny(), graph_safe=True, verbose=False)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]
    before = [p.clone() for p in matrices]
    for _ in range(3):
        (model(torch.randn(2, 3, 32, 32))[0] / 3).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(a, b) for a, b in zip(before, matrices, strict=True))


@pytest.mark.parametrize("backend", ["auto", "mem_efficient"])
def test_optional_levers(backend: str) -> None:
    model = optimize(small(), sdpa_backend=backend, verbose=False)
    assert enable_stage_checkpointing(model, stages=(2,)) == 7
    model(torch.randn(2, 8, 64, 64))[0].backward()
    assert model.blocks[4].attn.qkv.weight.grad is not None


@pytest.mark.parametrize("q_pool", [1, 2, 3])
@pytest.mark.parametrize("variant", ["tiny", "small", "base", "base_plus", "large", "huge"])
def test_every_variant_and_pooling_is_recognised(variant: str, q_pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes only: the real ones are compared with FAIR on a GPU."""
    stages = {"tiny": (1, 2, 7, 2), "small": (1, 2, 11, 2), "large": (2, 6, 36, 4), "huge": (2, 6, 36, 4)}
    width = {"base_plus": (112, 2), "large": (144, 2), "huge": (256, 4)}.get(variant, (96, 1))
    # FAIR reads the drop-path rates' values while it builds, which meta tensors do not have.
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
    with torch.device("meta"):
        model = hiera.MaskedAutoencoderHiera(
            embed_dim=width[0], num_heads=width[1], stages=stages.get(variant, (2, 3, 16, 3)), q_pool=q_pool
        )
        keep_idx = torch.zeros(2, 19, dtype=torch.int64)
        x = torch.empty(2, 3, 224, 224)
    optimize(model, verbose=False)
    loss, pred, _, mask = model(x, keep_idx=keep_idx)
    assert loss.shape == ()
    assert pred.shape[0] == 2 * 30 * 4 ** (3 - q_pool)
    assert mask.shape == (2, 49)


def test_the_published_names_are_all_here() -> None:
    published = {
        "optimize", "swap_mask_unit_attention", "recommended_backend", "make_mae_mask", "MAEStepInputs",
        "MaskUnitAttentionFast", "BACKEND_NAMES", "enable_stage_checkpointing", "disable_stage_checkpointing",
        "HieraAdapter", "get_hiera_adapter", "auto_detect", "MAEStaticInputsCallback", "feed_batch",
    }  # fmt: skip
    assert published <= set(hiera_optim.__all__)
    assert all(hasattr(hiera_optim, name) for name in hiera_optim.__all__)
