"""optimize(): give a FAIR model the fast path in place; restore(): take it away.

The model's class is exchanged for a cached subclass of it, so isinstance, parameters, state-dict keys,
deepcopy and pickling stay as they were, and no class of FAIR's is ever patched. Methods that a subclass (or
the instance) overrides are left alone: the whole fast path is taken only where every method and block involved
is FAIR's own, that is, from the last class of FAIR's name among the bases. Edits inside an in-tree copy of such
a class cannot be seen and are replaced: put them in a subclass. Forward hooks on inner modules (a block, an
attention) do not fire on the fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import nn

from hiera_optim.attention import BackendHint, MaskUnitAttentionFast, check_backend
from hiera_optim.encoder import FastState
from hiera_optim.geometry import FairModel, Geometry
from hiera_optim.mae import mae_forward
from hiera_optim.pieces import (
    forward_decoder,
    forward_encoder,
    forward_loss,
    get_pixel_label_1d,
    hiera_forward,
    piecewise_forward,
)
from hiera_optim.recognize import (
    all_blocks,
    blocks_are_fairs,
    check_hiera,
    is_fairs_own,
    is_mae_class,
    why_not_hiera,
)

M = TypeVar("M", bound=nn.Module)

_MAE_METHODS: dict[str, Callable[..., Any]] = {
    "forward": mae_forward,
    "forward_encoder": forward_encoder,
    "forward_decoder": forward_decoder,
    "forward_loss": forward_loss,
    "get_pixel_label_1d": get_pixel_label_1d,
}
_FAST_CLASSES: dict[tuple[type, frozenset[str]], type] = {}
_FAST_ATTENTION: dict[type, type] = {}


def overridden_methods(model: FairModel) -> frozenset[str]:
    """Names of FAIR's methods that this model does not take from FAIR, or that rest on parts that are not."""
    found: set[str] = set()
    if not is_mae_class(type(model)):
        own = is_fairs_own(model, "forward", "Hiera") and _encoder_is_fairs(model)
        return frozenset() if own else frozenset({"forward"})
    base = "MaskedAutoencoderHiera"
    for name in ("forward", "forward_encoder", "forward_decoder", "forward_loss"):
        if not is_fairs_own(model, name, base):
            found.add(name)
    label = f"get_pixel_label_{len(model.q_stride)}d"
    if hasattr(model, label) and not is_fairs_own(model, label, base):
        found.add(label)
    if not _encoder_is_fairs(model):
        found.add("forward_encoder")
    if not blocks_are_fairs(model.decoder_blocks):
        found.add("forward_decoder")
    return frozenset(found)


def _encoder_is_fairs(model: FairModel) -> bool:
    return blocks_are_fairs(model.blocks) and is_fairs_own(model.patch_embed, "forward", "PatchEmbed")


def _reduce(self: FairModel, protocol: object) -> tuple[Any, ...]:
    """Pickle and copy by way of the original class: the exchanged one cannot be found by its name."""
    return _rebuild, (self._hiera_original, self._hiera_overrides), self.__dict__


def _rebuild(original: type, overrides: frozenset[str]) -> nn.Module:
    cls: Any = _fast_class(original, overrides)
    model: nn.Module = cls.__new__(cls)
    return model


def _fast_class(original: type, overrides: frozenset[str]) -> type:
    """The cached subclass of `original` with the fast methods that `overrides` leaves room for."""
    key = (original, overrides)
    if key not in _FAST_CLASSES:
        namespace: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "_hiera_ours": True,
            "_hiera_original": original,
            "_hiera_overrides": overrides,
        }
        if is_mae_class(original):
            namespace |= {name: fn for name, fn in _MAE_METHODS.items() if name not in overrides}
            if overrides and "forward" not in overrides:
                namespace["forward"] = piecewise_forward
        elif not overrides:
            namespace["forward"] = hiera_forward
        _FAST_CLASSES[key] = type(original.__name__, (original,), namespace)
    return _FAST_CLASSES[key]


def recommended_backend(model: nn.Module, compile_enabled: bool = True) -> BackendHint:
    """The backend hint behind sdpa_backend="auto", or None where PyTorch's choice is best.

    Memory-efficient attention for the short sequences of mask units, whatever the dtype; global attention
    takes flash where it can. None without torch.compile, where a choice a block costs more than it gains, and
    for a model that is not Hiera.
    """
    if not compile_enabled or why_not_hiera(model) is not None:
        return None

    def pick(index: int, block: nn.Module) -> str | None:
        attn: FairModel = block.attn
        return "mem_efficient" if attn.use_mask_unit_attn else None

    return pick


def _backends(model: FairModel, hint: BackendHint) -> tuple[str | None, ...]:
    """One backend name or None a block, encoder then decoder. Raises ValueError for an unknown name."""
    if hint == "auto":
        hint = recommended_backend(model)
    blocks = all_blocks(model)
    if callable(hint):
        return tuple(check_backend(hint(i, block)) for i, block in enumerate(blocks))
    return (check_backend(hint),) * len(blocks)


def _fast_attention_class(cls: type) -> type:
    if cls not in _FAST_ATTENTION:
        namespace = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__reduce_ex__": _reduce_attention,
            "_hiera_ours": True,
            "_hiera_original": cls,
            "forward": MaskUnitAttentionFast.forward,
        }
        _FAST_ATTENTION[cls] = type(cls.__name__, (MaskUnitAttentionFast, cls), namespace)
    return _FAST_ATTENTION[cls]


def _reduce_attention(self: FairModel, protocol: object) -> tuple[Any, ...]:
    return _rebuild_attention, (self._hiera_original,), self.__dict__


def _rebuild_attention(original: type) -> nn.Module:
    cls: Any = _fast_attention_class(original)
    attention: nn.Module = cls.__new__(cls)
    return attention


def _swap_attention(model: FairModel, backends: tuple[str | None, ...]) -> int:
    """Exchange the class of every attention that is FAIR's own; returns how many were not fast before."""
    swapped = 0
    for block, backend in zip(all_blocks(model), backends, strict=True):
        attn = block.attn
        if not is_fairs_own(attn, "forward", "MaskUnitAttention"):
            continue
        if not isinstance(attn, MaskUnitAttentionFast):
            attn.__class__ = _fast_attention_class(type(attn))
            swapped += 1
        attn.sdpa_backend = backend
    return swapped


def swap_mask_unit_attention(model: nn.Module, sdpa_backend: BackendHint = None) -> int:
    """Give every MaskUnitAttention 4-D attention, in place, and leave the rest of the model as it is.

    Returns how many were exchanged (0 if all were already). Parameters keep their identity and names. Raises
    TypeError if the model is not Hiera and ValueError for an unknown backend.
    """
    check_hiera(model)
    backends = _backends(model, sdpa_backend)
    state = getattr(model, "_hiera_state", None)
    if isinstance(state, FastState):
        encoder, decoder = _split(model, backends)
        _set_state(model, replace(state, encoder_backends=encoder, decoder_backends=decoder))
    return _swap_attention(model, backends)


def _split(model: FairModel, backends: tuple[str | None, ...]) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    encoder = len(model.blocks)
    return backends[:encoder], backends[encoder:]


def _set_state(model: FairModel, state: FastState) -> None:
    model._hiera_state = state


def optimize(
    model: M,
    *,
    swap_attention: bool = True,
    swap_gather: bool = True,
    fused_block: bool = False,
    fused_mlp: bool = False,
    graph_safe: bool = False,
    sdpa_backend: BackendHint | Literal["auto"] = None,
    verbose: bool = True,
) -> M:
    """Make a FAIR Hiera or MaskedAutoencoderHiera fast, in place, and return it.

    Same numbers, parameters and state-dict keys as before. The MAE's forward also takes keep_idx, int64
    [B, L]: forward(x, mask_ratio=0.6, mask=None, keep_idx=None) -> (loss, pred, label, mask). A second call
    updates the options.

    swap_gather: False keeps FAIR's token order and forward; then only attention is exchanged.
    swap_attention: matters only where FAIR's forward stays; the fast path always has its own attention.
    sdpa_backend: None (flash, else memory-efficient, else math), "auto" (`recommended_backend`), a name in
        BACKEND_NAMES for all blocks, or a callable (index, block) -> name or None; encoder blocks are
        numbered first, then the decoder's. Where a kernel of this package runs, it is not used.
    fused_block, fused_mlp, graph_safe: accepted and without effect: the fast path is always safe to capture,
        and its kernels are chosen where they run.
    verbose: print one line that says what was done.

    Under torch.compile(dynamic=False) each batch size, each mask ratio and train or eval mode is one graph, compiled
    when first met and kept: a last partial batch costs one more compilation, going back to a known shape none.

    Raises TypeError if the model is not FAIR's Hiera, and ValueError for sizes that cannot work or an unknown
    backend; the model is then unchanged.
    """
    check_hiera(model)
    backends = _backends(model, sdpa_backend)
    geom = Geometry.from_model(model)
    _unswap(model)
    overrides = overridden_methods(model)
    fast = swap_gather and geom.zorder
    own_mask = is_fairs_own(model, "get_random_mask", "Hiera")
    if fast:
        _set_state(model, FastState(geom, *_split(model, backends), own_random_mask=own_mask))
        model.__class__ = _fast_class(type(model), overrides)
    if swap_attention and (overrides or not fast):
        _swap_attention(model, backends)
    if verbose:
        print(f"hiera_optim: {_describe(model, fast, overrides)}")
    return model


def _describe(model: nn.Module, fast: bool, overrides: frozenset[str]) -> str:
    name = type(model).__name__
    if not fast:
        return f"{name}: 4-D attention in FAIR's token order"
    if overrides:
        return f"{name}: fast parts, except what is overridden: {', '.join(sorted(overrides))}"
    return f"{name}: window-major fast path, {len(all_blocks(model))} blocks"


def _unswap(model: FairModel) -> None:
    if "_hiera_original" in type(model).__dict__:
        model.__class__ = type(model)._hiera_original
        del model._hiera_state
    for block in all_blocks(model):
        if "_hiera_original" in type(block.attn).__dict__:
            block.attn.__class__ = type(block.attn)._hiera_original
            del block.attn.sdpa_backend


def restore(model: M) -> M:
    """Undo optimize() and swap_mask_unit_attention() in place: FAIR's classes and forward. Returns the model.

    Stage checkpointing stays; see disable_stage_checkpointing. Raises TypeError if the model is not Hiera.
    """
    check_hiera(model)
    _unswap(model)
    return model
