"""Weights between wrapped and plain models: strip wrappers' prefixes, say key by key what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hiera_optim.masks import unwrap

_PREFIXES = ("module.", "_orig_mod.")


def clean_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A plain state dict: FAIR's "model_state" unpacked, "module." (DDP) and "_orig_mod." (compile) removed.

    Raises ValueError if two keys become one.
    """
    inner = state_dict.get("model_state", state_dict)
    cleaned: dict[str, Tensor] = {}
    for key, value in inner.items():
        name = key
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name in cleaned:
            raise ValueError(f"state dict has {name!r} twice, with and without a wrapper's prefix")
        cleaned[name] = value
    return cleaned


def state_dict_mismatches(model: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """One line a key that is missing, unexpected or of another shape; empty if the dict loads strictly."""
    own = unwrap(model).state_dict()
    given = clean_state_dict(state_dict)
    lines = [f"{key}: missing" for key in own if key not in given]
    lines += [f"{key}: not in the model" for key in given if key not in own]
    for key, value in own.items():
        if key in given and given[key].shape != value.shape:
            lines.append(f"{key}: the model has {list(value.shape)}, the checkpoint {list(given[key].shape)}")
    return lines


def load_weights(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load FAIR's or our weights strictly, from under any wrapper, into a plain or wrapped model.

    Position embeddings are never resized: interpolating the window and global embeddings of Hiera costs
    accuracy. Raises ValueError that names every key that does not fit; the model is then unchanged.
    """
    lines = state_dict_mismatches(model, state_dict)
    if lines:
        raise ValueError("checkpoint does not fit the model: " + "; ".join(lines))
    unwrap(model).load_state_dict(clean_state_dict(state_dict), strict=True)
