"""Muon against torch.optim.Muon; convergence, determinism, state, and independence of the number of ranks."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from hiera_optim.optim import Muon, muon_parameters, no_decay_parameters
from hiera_optim.optim.muon import learning_rate_factor


class Block(nn.Module):
    """Stands for a model: names as in Hiera, small sizes, one of them odd."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(6, 16)
        self.attn = nn.Module()
        self.attn.qkv = nn.Linear(16, 48)
        self.fc1 = nn.Linear(16, 40)
        self.fc2 = nn.Linear(40, 16)
        self.odd = nn.Linear(16, 7)
        self.decoder_pred = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        q, k, v = self.attn.qkv(x).chunk(3, dim=-1)
        x = x + torch.tanh(q * k) * v
        x = x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))
        out: Tensor = self.decoder_pred(self.odd(x))
        return out


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[Block, Muon]:
    torch.manual_seed(seed)
    model = Block().to(dtype)
    settings: dict[str, Any] = {"lr": 1e-2, "no_decay": no_decay_parameters(model)}
    settings |= arguments
    return model, Muon(model.named_parameters(), muon=muon_parameters(model), **settings)


def train(model: Block, optimizer: Muon, steps: int, start: int = 0, clip: bool = True) -> None:
    for step in range(start, start + steps):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step)).to(optimizer.params.dtype)
        optimizer.zero_grad()
        (model(x).float() - x.float().flip(-1)).square().mean().backward()
        optimizer.step(optimizer.grad_norm().clamp(min=1).reciprocal() if clip else None)


def test_a_nan_does_not_outlive_the_state_that_is_loaded_after_it() -> None:
    """It spreads to the padding of the work space, which no step writes."""
    (model, optimizer), (expected, untroubled) = make(), make()
    for each in ((model, optimizer), (expected, untroubled)):
        train(*each, 2)
    assert optimizer._has_padding
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.odd.weight.grad.fill_(math.nan)
    optimizer.step()
    assert model.odd.weight.isnan().any()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for each in ((model, optimizer), (expected, untroubled)):
        train(*each, 2, start=2)
    assert torch.equal(optimizer.params.flat, untroubled.params.flat)


def test_takes_the_hidden_matrices_of_hiera() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hiera.hiera_mae import MaskedAutoencoderHiera

        model = MaskedAutoencoderHiera(
            input_size=(64, 64),
            embed_dim=16,
            stages=(1, 1, 1, 1),
            q_pool=2,
            decoder_embed_dim=16,
            decoder_depth=1,
        )
    names = muon_parameters(model)
    assert names >= {"blocks.0.attn.qkv.weight", "blocks.1.proj.weight", "blocks.3.mlp.fc2.weight"}
    assert names >= {"decoder_embed.weight", "decoder_blocks.0.attn.proj.weight"}
    assert names >= {"multi_scale_fusion_heads.0.weight", "multi_scale_fusion_heads.1.weight"}
    rest = {name for name, _ in model.named_parameters()} - names
    assert {name for name in rest if "norm" not in name and not name.endswith(".bias")} == {
        "pos_embed",
        "patch_embed.proj.weight",
        "mask_token",
        "decoder_pos_embed",
        "decoder_pred.weight",
    }
    optimizer = Muon(model.named_parameters(), muon=names, lr=1e-3)
    shapes = {(m.rows, m.cols) for m in optimizer.matrices}
    assert (16, 16) in shapes
    assert (64, 16 * 16) in shapes or (64, 256) in shapes


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (7, 33)])
def test_equals_torch_for_one_matrix(adjust_lr: Any, nesterov: bool, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Muon(
        [("w", ours)],
        muon=["w"],
        lr=0.02,
        adjust_lr=adjust_lr,
        nesterov=nesterov,
        weight_decay=0.1,
        ns_dtype=torch.bfloat16,
    )
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust_lr, momentum=0.95
    )
    for _ in range(5):
        grad = torch.randn(shape, generator=generator)
        assert ours.grad is not None
        ours.grad.copy_(grad)
        theirs.grad = grad.clone()
        optimizer.step()
        reference.step()
    ours_change, theirs_change = ours.detach() - start, theirs.detach() - start
    # torch takes the norm in bfloat16, we in float32; both iterate in bfloat16.
    assert (ours_change - theirs_change).norm() < 0.02 * theirs_change.norm()
    torch.testing.assert_close(
        optimizer.momentum[: ours.numel()].view(shape), reference.state[theirs]["momentum_buffer"]
    )


def test_qkv_is_three_matrices() -> None:
    """The update of v does not depend on the gradient of q, unless the matrix is taken whole."""
    for split in (True, False):
        results = []
        for scale in (1.0, 10.0):
            model, optimizer = make(split_qkv=split, weight_decay=0.0)
            before = model.attn.qkv.weight.detach().clone()
            generator = torch.Generator().manual_seed(0)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            assert model.attn.qkv.weight.grad is not None
            model.attn.qkv.weight.grad[:16] *= scale
            optimizer.step()
            results.append((model.attn.qkv.weight.detach() - before)[32:])
        assert ((results[0] - results[1]).abs().max() < 1e-6) == split


def test_update_has_orthogonal_rows_and_the_stated_size() -> None:
    model, optimizer = make(weight_decay=0.0, lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.copy_(torch.randn(p.shape, generator=generator))
    optimizer.step()
    for name in ("fc1.weight", "fc2.weight", "odd.weight"):
        change = dict(model.named_parameters())[name].detach() - before[name]
        singular = torch.linalg.svdvals(change / learning_rate_factor(*change.shape, "match_rms_adamw"))
        assert singular.min() > 0.5
        assert singular.max() < 1.5


def test_the_rest_is_adamw() -> None:
    model, optimizer = make(weight_decay=0.2)
    twin, _ = make()
    rest = [p for name, p in twin.named_parameters() if name in ("patch_embed.weight", "decoder_pred.weight")]
    reference = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.2)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator))
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(model.patch_embed.weight, twin.patch_embed.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.decoder_pred.weight, twin.decoder_pred.weight, rtol=1e-6, atol=1e-6)


def test_muon_lr_keeps_its_ratio_to_lr() -> None:
    changes = []
    for lr, muon_lr, later in ((1e-2, None, 1e-2), (1e-3, 1e-2, 1e-3), (1e-3, 2e-2, 5e-4)):
        model, optimizer = make(lr=lr, muon_lr=muon_lr, adjust_lr="original")
        before = model.fc1.weight.detach().clone()
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator))
        optimizer.lr.fill_(later)
        optimizer.step()
        changes.append(model.fc1.weight.detach() - before)
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(changes[0], changes[2], rtol=1e-5, atol=1e-7)


def test_grad_scale_and_zero_grad() -> None:
    model, optimizer = make(momentum=0.5)
    twin, other = make(momentum=0.5)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        # Powers of two, so that scaling is exact; the momentum mixes steps of different scales.
        scale = 2.0**-step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator))
            q.grad.copy_(p.grad * scale)
        optimizer.step(torch.tensor(scale), zero_grad=True)
        other.step()
        assert not optimizer.flat_grads[0].any()
    torch.testing.assert_close(optimizer.params.flat, other.params.flat, rtol=1e-6, atol=1e-6)


def test_two_runs_are_bitwise_equal() -> None:
    flats = []
    for _ in range(2):
        model, optimizer = make()
        train(model, optimizer, 5)
        flats.append(optimizer.params.flat.clone())
    assert torch.equal(flats[0], flats[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converges(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype=dtype, weight_decay=0.0)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(99)).to(dtype)

    def loss() -> float:
        with torch.no_grad():
            return (model(x).float() - x.float().flip(-1)).square().mean().item()

    first = loss()
    for step in range(150):
        optimizer.lr.fill_(1e-2 * 0.5 * (1 + math.cos(math.pi * step / 150)))
        train(model, optimizer, 1, start=step)
    assert loss() < 0.02 * first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_into_another_layout(dtype: torch.dtype) -> None:
    # Without decay and clipping, which see the layout (the norm by its rounding), nothing else does.
    model, optimizer = make(dtype=dtype, weight_decay=0.0)
    train(model, optimizer, 3, clip=False)
    state, weights = optimizer.state_dict(), optimizer.master_parameters()
    assert state["momentum.fc1.weight"].shape == (40, 16)
    assert "momentum.patch_embed.weight" not in state
    assert "exp_avg.patch_embed.weight" in state
    train(model, optimizer, 2, start=3, clip=False)
    exempt = [*no_decay_parameters(model), "decoder_pred.weight"]
    other, resumed = make(seed=7, dtype=dtype, weight_decay=0.0, no_decay=exempt)
    resumed.load_state_dict(state)
    resumed.load_master_parameters(weights)
    train(other, resumed, 2, start=3, clip=False)
    expected, actual = optimizer.master_parameters(), resumed.master_parameters()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"adjust_lr": "other"}, "adjust_lr"),
        ({"muon_lr": 0.02, "lr": 0.0}, "muon_lr"),
        ({"no_decay": ["fc1.weight"]}, "both muon and no_decay"),
        ({"no_decay": ["fc9.weight"]}, "fc9"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)
    model = Block()
    with pytest.raises(ValueError, match=r"fc1\.bias, which is not a matrix"):
        Muon(model.named_parameters(), muon=["fc1.bias"], lr=1e-3)


def train_in_rank(rank: int, ranks: int, folder: str) -> None:
    """Trains the same model on the same data in every rank, sharing the Newton–Schulz work."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model, optimizer = make(fp32_accumulation=True)
    assert optimizer.ranks == ranks
    train(model, optimizer, 3)
    torch.save({**optimizer.master_parameters(), **optimizer.state_dict()}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_ranks_do_not_change_a_bit(tmp_path: Path) -> None:
    mp.spawn(train_in_rank, args=(2, str(tmp_path)), nprocs=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, optimizer = make(fp32_accumulation=True)
        train(model, optimizer, 3)
    finally:
        torch.set_num_threads(threads)
    single = {**optimizer.master_parameters(), **optimizer.state_dict()}
    for rank in range(2):
        shared = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert shared.keys() == single.keys()
        assert all(torch.equal(shared[key], single[key]) for key in single)
