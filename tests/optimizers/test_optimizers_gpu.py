"""On a GPU: kernels against the plain path at full speed's dtypes, and steps replayed from a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiera_optim.optim import AdamW, FlatOptimizer, Muon, muon_parameters, no_decay_parameters
from hiera_optim.optim.adamw import adamw_reference

pytestmark = pytest.mark.gpu


def make(kind: str, dtype: torch.dtype, **arguments: Any) -> tuple[nn.Module, FlatOptimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 384), nn.GELU(), nn.LayerNorm(384), nn.Linear(384, 96), nn.Linear(96, 33)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    no_decay = no_decay_parameters(model)
    if kind == "adamw":
        return model, AdamW(model.named_parameters(), lr=1e-2, no_decay=no_decay, **arguments)
    names = muon_parameters(model)
    return model, Muon(model.named_parameters(), muon=names, lr=1e-2, no_decay=no_decay, **arguments)


def gradient(optimizer: FlatOptimizer, step: int) -> Tensor:
    """Random, zero in the padding."""
    generator = torch.Generator("cuda").manual_seed(step)
    flat = torch.zeros_like(optimizer.params.flat)
    for entry in optimizer.params.entries:
        values = torch.randn(entry.shape, generator=generator, device="cuda")
        entry.view(flat).copy_(values)
    return flat


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_adamw_kernel_equals_reference(dtype: torch.dtype, master: bool, zero_grad: bool) -> None:
    _, optimizer = make("adamw", dtype, master=master)
    assert isinstance(optimizer, AdamW)
    scale, count = torch.tensor(0.3, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    state = [optimizer.params.flat, optimizer.exp_avg, optimizer.exp_avg_sq]
    param, exp_avg, exp_avg_sq = (tensor.clone() for tensor in state)
    masters = None if optimizer.master is None else optimizer.master.clone()
    for step in range(5):
        grad = gradient(optimizer, step)
        optimizer.params.flat_grad.copy_(grad)
        optimizer.step(scale, zero_grad=zero_grad)
        count += 1
        adamw_reference(param, grad, exp_avg, exp_avg_sq, masters, optimizer.lr, count, scale, optimizer.settings)
        assert zero_grad != bool(optimizer.params.flat_grad.any())
    torch.testing.assert_close(optimizer.exp_avg, exp_avg, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(optimizer.exp_avg_sq, exp_avg_sq, rtol=1e-5, atol=1e-7)
    if masters is not None:
        torch.testing.assert_close(optimizer.master, masters, rtol=1e-5, atol=1e-6)
    # Without masters two roundings can part by a unit in the last place, and then once more; the unit is that of the
    # largest value a weight had on its way, here up to 0.1.
    rtol, atol = (2**-6, 2**-10) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(optimizer.params.flat, param, rtol=rtol, atol=atol)


def test_muon_equals_the_cpu() -> None:
    """bfloat16 iterations on the GPU, float32 ones on the CPU."""
    results = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 33)).to(device)
        optimizer = Muon(model.named_parameters(), muon=muon_parameters(model), lr=0.02)
        start = optimizer.params.flat.cpu().clone()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            optimizer.step()
        results.append(optimizer.params.flat.cpu() - start)
    assert (results[0] - results[1]).norm() < 0.05 * results[1].norm()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_equal_eager_ones_with_a_schedule(kind: str, dtype: torch.dtype) -> None:
    eager_model, eager = make(kind, dtype, fp32_accumulation=True)
    model, optimizer = make(kind, dtype, fp32_accumulation=True)

    def body() -> None:
        optimizer.accumulate()
        optimizer.step(optimizer.grad_norm().clamp(min=1).reciprocal(), zero_grad=True)

    saved = [(tensor, tensor.clone()) for tensor in optimizer.buffers()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    for tensor, copy in saved:
        tensor.copy_(copy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for step in range(5):
        grad = gradient(eager, step)
        for each in (eager, optimizer):
            each.lr.fill_(1e-2 / (step + 1))
            each.params.flat_grad.copy_(grad)
        eager.accumulate()
        eager.step(eager.grad_norm().clamp(min=1).reciprocal(), zero_grad=True)
        graph.replay()
    assert optimizer.step_count.item() == 5
    assert torch.equal(optimizer.params.flat, eager.params.flat)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), eager_model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_gradient_outside_the_flat_buffer_is_an_error_during_capture() -> None:
    model, optimizer = make("adamw", torch.float32)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"use the optimizer's zero_grad"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.zero_grad()
    optimizer.step()
