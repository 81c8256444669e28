"""How the fused kernels become PyTorch operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from hiera_optim.ops._launch import on_device_of


def custom_op(name: str, *, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """`torch.library.custom_op` without mutated arguments, run on the device of its first tensor.

    The annotations of the function are resolved here: they may name Tensor, torch and builtins.
    """

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def on_its_device(*arguments: Any, **keywords: Any) -> Any:
            first = next(a for a in (*arguments, *keywords.values()) if isinstance(a, Tensor))
            with on_device_of(first):
                return function(*arguments, **keywords)

        operator: CustomOpDef = torch.library.custom_op(name, on_its_device, mutates_args=(), tags=tags or None)
        return operator

    return decorate
