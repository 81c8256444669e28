"""The flat layout: what is where, what autograd does with it, and state that does not depend on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hiera_optim.optim import AdamW, no_decay_parameters
from hiera_optim.optim.flat import ALIGNMENT


class Tied(nn.Module):
    """Two layers that share one weight, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 5))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, model[0].in_features if isinstance(model, nn.Sequential) else 6)).square().sum().backward()


def test_parameters_keep_identity_and_values_and_move_into_one_buffer() -> None:
    model = small_model()
    objects = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in objects.items()}
    optimizer = AdamW(model.named_parameters(), lr=1e-3, no_decay=no_decay_parameters(model))
    flat = optimizer.params.flat
    for name, p in model.named_parameters():
        assert p is objects[name]
        assert torch.equal(p, values[name])
        assert p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert (p.data_ptr() - flat.data_ptr()) % (ALIGNMENT * 4) == 0
    flat.fill_(3.0)
    assert all((p == 3).all() for p in model.parameters())


def test_order_is_decay_then_no_decay_and_last_registered_first() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3, no_decay=no_decay_parameters(model))
    names = [entry.name for entry in optimizer.params.entries]
    assert names == ["3.weight", "0.weight", "3.bias", "1.bias", "1.weight", "0.bias"]
    offsets = [entry.offset for entry in optimizer.params.entries]
    assert offsets == sorted(offsets)
    assert optimizer.params.ranges["decay"] == (0, 512)


def test_autograd_accumulates_in_place_into_the_flat_gradient() -> None:
    model, plain = small_model(), small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    for _ in range(2):
        backward(model)
        backward(plain)
    (flat,) = optimizer.flat_grads
    for entry in optimizer.params.entries:
        expected = dict(plain.named_parameters())[entry.name].grad
        assert expected is not None
        assert torch.equal(entry.view(flat), expected)
        assert entry.parameter.grad is not None
        assert entry.parameter.grad.data_ptr() == entry.view(flat).data_ptr()


def test_gradients_set_to_none_are_repaired() -> None:
    model, plain = small_model(), small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    backward(model)
    model.zero_grad(set_to_none=True)
    assert optimizer.grad_norm().item() == 0
    backward(model)
    model.zero_grad(set_to_none=True)
    backward(model)
    backward(plain)
    (flat,) = optimizer.flat_grads
    for entry, q in ((e, dict(plain.named_parameters())[e.name]) for e in optimizer.params.entries):
        assert q.grad is not None
        assert torch.equal(entry.view(flat), q.grad)
        assert entry.parameter.grad is not None
        assert entry.parameter.grad.data_ptr() == entry.view(flat).data_ptr()
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    assert model[0].weight.grad is not None
    assert not flat.any()


def test_a_model_that_moved_is_an_error() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"has left the optimizer's flat buffer"):
        optimizer.step()


def test_tied_weights_are_laid_out_once_and_frozen_ones_left_alone() -> None:
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    optimizer = AdamW(model.named_parameters(remove_duplicate=False), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.05)
    assert sorted(optimizer.master_parameters()) == ["first.bias", "first.weight"]
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(model)
        backward(plain)
        optimizer.step()
        reference.step()
    assert model.second.weight is model.first.weight
    torch.testing.assert_close(model.first.weight, plain.first.weight, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.frozen, torch.ones(3))


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        AdamW([], lr=1e-3)
    mixed = small_model()
    mixed[3].bfloat16()
    with pytest.raises(ValueError, match=r"3\.weight is torch\.bfloat16"):
        AdamW(mixed.named_parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"float64"):
        AdamW(small_model().double().named_parameters(), lr=1e-3)
    whole = torch.zeros(10)
    overlapping = [("a", nn.Parameter(whole[:6])), ("b", nn.Parameter(whole[5:]))]
    with pytest.raises(ValueError, match="a and b share memory"):
        AdamW(overlapping, lr=1e-3)


def test_buckets_cover_the_gradient_once_in_order() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(9)])
    optimizer = AdamW(model.named_parameters(), lr=1e-3, no_decay=no_decay_parameters(model))
    buckets = optimizer.params.buckets(3 * 32 * 32 * 4)
    (flat,) = optimizer.flat_grads
    position = flat.data_ptr()
    for bucket in buckets:
        assert bucket.grad.data_ptr() == position
        position += bucket.grad.numel() * 4
        for p in bucket.parameters:
            assert p.grad is not None
            assert bucket.grad.data_ptr() <= p.grad.data_ptr() < position
    assert position == flat.data_ptr() + flat.numel() * 4
    assert [len(bucket.parameters) for bucket in buckets] == [3, 3, 3, 9]
    assert buckets[0].parameters[0] is model[8].weight
    assert len(optimizer.params.buckets(1)) == 18
    assert len(optimizer.params.buckets(1 << 40)) == 2
    with pytest.raises(ValueError, match="bucket size"):
        optimizer.params.buckets(0)


def test_bucket_is_final_when_its_parameters_are() -> None:
    """What an all-reduce overlapped with backward relies on."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = AdamW(model.named_parameters(), lr=1e-3, no_decay=no_decay_parameters(model))
    buckets = optimizer.params.buckets(1)
    finished: list[int] = []
    for index, bucket in enumerate(buckets[:4]):
        for p in bucket.parameters:
            p.register_post_accumulate_grad_hook(lambda _, index=index: finished.append(index))
    backward(model)
    assert finished == [0, 1, 2, 3]


def train(model: nn.Module, optimizer: AdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_into_another_layout(dtype: torch.dtype) -> None:
    """Groups differ (so offsets do), and the run goes on bit for bit."""

    def model_of(dtype: torch.dtype) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)).to(dtype)

    def forward_backward(model: nn.Module, optimizer: AdamW, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=dtype)).square().sum().backward()
            optimizer.step()

    model = model_of(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0)
    forward_backward(model, optimizer, 3)
    state, weights = optimizer.state_dict(), optimizer.master_parameters()
    assert all(tensor.dtype == torch.float32 for key, tensor in state.items() if key != "step")
    assert state["step"].item() == 3
    forward_backward(model, optimizer, 3)

    other = model_of(dtype)
    resumed = AdamW(
        other.named_parameters(),
        lr=1e-2,
        weight_decay=0.0,
        no_decay=["0.weight", "1.bias"],
        fp32_accumulation=False,
    )
    assert [e.offset for e in resumed.params.entries] != [e.offset for e in optimizer.params.entries] or [
        e.name for e in resumed.params.entries
    ] != [e.name for e in optimizer.params.entries]
    resumed.load_state_dict(state)
    resumed.load_master_parameters(weights)
    forward_backward(other, resumed, 3)
    expected, actual = optimizer.master_parameters(), resumed.master_parameters()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_state_is_a_copy() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 1)
    state, weights = optimizer.state_dict(), optimizer.master_parameters()
    kept = {key: tensor.clone() for key, tensor in {**state, **weights}.items()}
    train(model, optimizer, 1)
    assert all(torch.equal(kept[key], tensor) for key, tensor in {**state, **weights}.items())


def test_loading_is_strict_and_changes_nothing_when_refused() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 2)
    state, weights = optimizer.state_dict(), optimizer.master_parameters()
    missing = {key: tensor + 1 for key, tensor in state.items() if key != "exp_avg_sq.1.bias"}
    with pytest.raises(ValueError, match=r"optimizer state lacks exp_avg_sq\.1\.bias"):
        optimizer.load_state_dict(missing)
    with pytest.raises(ValueError, match=r"unknown entry momentum\.x"):
        optimizer.load_state_dict({**state, "momentum.x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"0\.weight has shape \[7, 33\], expected \[33, 7\]"):
        optimizer.load_master_parameters({**weights, "0.weight": torch.zeros(7, 33)})
    after = optimizer.state_dict()
    assert all(torch.equal(state[key], after[key]) for key in state)


def test_model_state_dict_still_loads_into_a_plain_model() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 1)
    plain = small_model()
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    model.load_state_dict(small_model().state_dict())
    assert torch.equal(optimizer.master_parameters()["0.weight"], small_model()[0].weight)
    assert not torch.equal(plain[0].weight, model[0].weight)


def test_bucket_gradient_is_what_the_step_reads() -> None:
    """With a float32 sum it moves the bfloat16 gradient there; gradients set to None are found again."""
    for fp32_accumulation in (False, True):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).bfloat16()
        optimizer = AdamW(model.named_parameters(), lr=1e-3, fp32_accumulation=fp32_accumulation)
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, 32, dtype=torch.bfloat16)).square().sum().backward()
        expected = [p.grad.float() for p in model.parameters() if p.grad is not None]
        for bucket in optimizer.params.buckets(2048):
            optimizer.bucket_gradient(bucket).mul_(2)
        (flat,) = optimizer.flat_grads
        assert flat.dtype == (torch.float32 if fp32_accumulation else torch.bfloat16)
        actual = {entry.name: entry.view(flat).float() for entry in optimizer.params.entries}
        for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
            assert torch.equal(actual[name], 2 * grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_restore_everything(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)).to(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, fp32_accumulation=True)

    def run() -> Tensor:
        for _ in range(3):
            model(torch.ones(2, 8, dtype=dtype)).square().sum().backward()
            optimizer.accumulate()
            optimizer.step(zero_grad=True)
        return optimizer.params.flat.clone()

    saved = [(tensor, tensor.clone()) for tensor in optimizer.buffers()]
    first = run()
    for tensor, copy_ in saved:
        tensor.copy_(copy_)
    assert torch.equal(run(), first)
    assert not torch.equal(saved[0][1], first)
