"""What code that does not know Hiera may ask about one: is it an MAE, where are its blocks, which classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hiera_optim.geometry import FairModel
from hiera_optim.recognize import check_hiera, fair_class, is_mae_class, why_not_hiera


class HieraAdapter:
    """Introspection of FAIR's Hiera, found from a model rather than imported.

    Without a model the classes come from the installed `hiera` package. Raises TypeError if model is not
    Hiera, ImportError if there is no model and no package.
    """

    layout = "T_outer_nw_inner"
    """FAIR's token order after Unroll: the mask unit is the fastest dimension."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._block: type
        self._attention: type
        if model is None:
            from hiera_optim.compat import import_hiera

            package = import_hiera()
            self._block, self._attention = package.HieraBlock, package.MaskUnitAttention
        else:
            check_hiera(model)
            block: FairModel = model.blocks[0]  # type: ignore[index]
            self._block = fair_class(type(block), "HieraBlock") or type(block)
            self._attention = fair_class(type(block.attn), "MaskUnitAttention") or type(block.attn)

    def matches(self, model: nn.Module) -> bool:
        """True if model is FAIR's Hiera or MaskedAutoencoderHiera, from whatever module."""
        return why_not_hiera(model) is None

    def is_mae(self, model: nn.Module) -> bool:
        return self.matches(model) and is_mae_class(type(model))

    def block_class(self) -> type:
        """FAIR's HieraBlock."""
        return self._block

    def attention_class(self) -> type:
        """FAIR's MaskUnitAttention."""
        return self._attention

    def encoder_blocks(self, model: FairModel) -> nn.ModuleList:
        blocks: nn.ModuleList = model.blocks
        return blocks

    def decoder_blocks(self, model: FairModel) -> nn.ModuleList | None:
        """The MAE's decoder blocks, None for a classifier."""
        return getattr(model, "decoder_blocks", None)

    def stage_ends(self, model: FairModel) -> list[int]:
        """Number of the last block of each stage."""
        return list(model.stage_ends)

    def _fairs(self, function: str, home: str) -> Any:
        import importlib

        package = self._block.__module__.rpartition(".")[0]
        for name in (self._block.__module__, f"{package}.{home}" if package else home):
            found = getattr(importlib.import_module(name), function, None)
            if found is not None:
                return found
        raise ImportError(f"{function} is not beside {self._block.__module__}.HieraBlock")

    def apply_fusion_head(self, head: nn.Module, x: Tensor) -> Tensor:
        """FAIR's function of this name: x [B, L, *unit, C] through one fusion head."""
        result: Tensor = self._fairs("apply_fusion_head", "hiera_mae")(head, x)
        return result

    def undo_windowing(self, x: Tensor, shape: list[int], mu_shape: list[int]) -> Tensor:
        """FAIR's function of this name: mask units [B, M, *unit, C] to the grid [B, *shape, C]."""
        result: Tensor = self._fairs("undo_windowing", "hiera_utils")(x, shape, mu_shape)
        return result


def get_hiera_adapter(model: nn.Module) -> HieraAdapter | None:
    """An adapter for the model, or None if it is not FAIR's Hiera."""
    return HieraAdapter(model) if why_not_hiera(model) is None else None


def auto_detect(model: nn.Module) -> HieraAdapter | None:
    """The adapter that fits the model, or None; Hiera is the only family there is."""
    return get_hiera_adapter(model)
