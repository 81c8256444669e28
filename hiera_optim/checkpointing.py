"""Activation checkpointing by stage: store a block's input only and recompute its activations in backward.

No module is wrapped, so state-dict keys and parameter identity stay. The choice is kept on the model as
`_hiera_checkpoint` (a frozenset of encoder block numbers) and `_hiera_checkpoint_decoder` (bool), which the
fast path reads. Blocks called as modules (FAIR's own forward) get a subclass of their class that recomputes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hiera_optim.geometry import FairModel
from hiera_optim.recognize import check_hiera

_RECOMPUTING: dict[type, type] = {}


def _recomputing_class(cls: type) -> type:
    """A cached subclass of a block's class whose forward is recomputed in backward, in training mode."""
    if cls not in _RECOMPUTING:

        def forward(self: FairModel, *args: Any, **kwargs: Any) -> Tensor:
            inner = cls.forward.__get__(self)  # type: ignore[attr-defined]
            if self.training and torch.is_grad_enabled():
                result: Tensor = checkpoint(inner, *args, use_reentrant=False, **kwargs)
                return result
            direct: Tensor = inner(*args, **kwargs)
            return direct

        namespace = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__reduce_ex__": _reduce,
            "_hiera_ours": True,
            "_hiera_recomputed": cls,
            "forward": forward,
        }
        _RECOMPUTING[cls] = type(cls.__name__, (cls,), namespace)
    return _RECOMPUTING[cls]


def _reduce(self: FairModel, protocol: object) -> tuple[Any, ...]:
    return _rebuild, (self._hiera_recomputed,), self.__dict__


def _rebuild(original: type) -> nn.Module:
    cls: Any = _recomputing_class(original)
    block: nn.Module = cls.__new__(cls)
    return block


def _mark(block: nn.Module) -> int:
    """Make one block recompute; 1 if it did not before."""
    if "_hiera_recomputed" in type(block).__dict__:
        return 0
    block.__class__ = _recomputing_class(type(block))
    return 1


def _unmark(block: FairModel) -> int:
    if "_hiera_recomputed" not in type(block).__dict__:
        return 0
    block.__class__ = type(block)._hiera_recomputed
    return 1


def blocks_of_stages(model: FairModel, stages: Iterable[int]) -> frozenset[int]:
    """Numbers of the encoder blocks of 0-based stages. Raises ValueError for a stage the model lacks."""
    ends = [int(end) for end in model.stage_ends]
    numbers: set[int] = set()
    for stage in stages:
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < len(ends):
            raise ValueError(f"stages must be from 0 to {len(ends) - 1}, not {stage!r}")
        numbers.update(range(ends[stage - 1] + 1 if stage else 0, ends[stage] + 1))
    return frozenset(numbers)


def enable_stage_checkpointing(model: nn.Module, stages: Iterable[int] | str = (2,), decoder: bool = False) -> int:
    """Recompute the activations of these encoder stages in backward, in place; returns the blocks added.

    stages: 0-based stage numbers, or "all". decoder: the MAE's decoder blocks too (a classifier has none).
    Works before and after optimize(), adds to earlier calls, and draws stochastic depth again identically.
    Raises TypeError if the model is not Hiera and ValueError for a stage it does not have.
    """
    check_hiera(model)
    hiera: FairModel = model
    if isinstance(stages, str):
        if stages != "all":
            raise ValueError(f"stages must be stage numbers or 'all', not {stages!r}")
        stages = range(len(hiera.stage_ends))
    numbers = blocks_of_stages(hiera, stages)
    added = sum(_mark(hiera.blocks[i]) for i in sorted(numbers))
    hiera._hiera_checkpoint = getattr(hiera, "_hiera_checkpoint", frozenset()) | numbers
    if decoder and hasattr(hiera, "decoder_blocks"):
        added += sum(_mark(block) for block in hiera.decoder_blocks)
        hiera._hiera_checkpoint_decoder = True
    return added


def disable_stage_checkpointing(model: nn.Module) -> int:
    """Store all activations again, in place; returns how many blocks were recomputed before."""
    check_hiera(model)
    hiera: FairModel = model
    removed = sum(_unmark(block) for block in [*hiera.blocks, *getattr(hiera, "decoder_blocks", ())])
    hiera.__dict__.pop("_hiera_checkpoint", None)
    hiera.__dict__.pop("_hiera_checkpoint_decoder", None)
    return removed
