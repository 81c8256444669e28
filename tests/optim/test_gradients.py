"""GradientReducer: a bucket is all-reduced once, and only when backward has written all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiera_optim import gradients
from hiera_optim.gradients import GradientReducer
from hiera_optim.optim import AdamW
from hiera_optim.optim.flat import Bucket


class Fused(torch.autograd.Function):
    """Writes its parameters' gradients itself, tells the reducer and gives autograd none, as a chain does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reducer: GradientReducer, *parameters: nn.Parameter) -> Tensor:
        ctx.reducer, ctx.parameters = reducer, parameters
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        for parameter in ctx.parameters:
            parameter.grad.fill_(1.0)
        ctx.reducer.ready([p.data_ptr() for p in ctx.parameters])
        return grad * 2, None, *(None for _ in ctx.parameters)


class Plain(torch.autograd.Function):
    """Leaves its parameters' gradients to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.parameters = parameters
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * 2, *(torch.ones_like(p) for p in ctx.parameters)


@pytest.mark.parametrize("bucket_bytes", [1, 3 << 10, 1 << 20])
def test_buckets_are_whole_when_they_are_reduced(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    parameters = [nn.Parameter(torch.randn(256)) for _ in range(9)]
    unused = nn.Parameter(torch.randn(256))
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    optimizer = AdamW([*named, ("unused", unused)], lr=1e-3, no_decay=())
    reducer = GradientReducer(optimizer)
    whole: list[Bucket] = []

    def check(bucket: Bucket) -> None:
        assert all(torch.equal(p.grad, torch.ones(256)) for p in bucket.parameters if p is not unused)  # type: ignore[arg-type]
        whole.append(bucket)

    monkeypatch.setattr(reducer, "_reduce", check)
    for _ in range(2):
        whole.clear()
        optimizer.zero_grad()
        x = torch.ones(2, requires_grad=True)
        y = Fused.apply(x, reducer, *parameters[:3])
        y = Plain.apply(y, *parameters[3:5])
        y = Fused.apply(y, reducer, *parameters[5:])
        with reducer.reduce_in_backward():
            y.sum().backward()
        assert len(whole) == len(reducer._buckets)
        assert {id(p) for bucket in whole for p in bucket.parameters} == {id(p) for p in [*parameters, unused]}
