"""Import FAIR's `hiera` with any timm, or none.

hiera-transformer 0.1.4 takes two small modules from `timm.models.layers`, which warns today and will go, and
`packaging` to look at huggingface_hub. `import_hiera` lends it equivalents while it is imported: nothing of
timm (or torchvision, which timm pulls in) is loaded, no warning is raised, and sys.modules is left as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_LOCK = threading.Lock()


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016), drawn once a sample; the draw that timm's DropPath makes."""

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ...], of which whole samples are zeroed in training."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep)
        if keep > 0.0 and self.scale_by_keep:
            kept.div_(keep)
        return x * kept

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}"


class Mlp(nn.Module):
    """Linear, activation, linear, with the parameter names of timm's Mlp (fc1, fc2)."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        bias: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden, bias=bias)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features]."""
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        result: Tensor = self.drop2(self.fc2(x))
        return result


def _version_key(text: str) -> tuple[int, ...]:
    """Leading release numbers of a version, enough to compare releases."""
    numbers = []
    for part in text.split("."):
        digits = ""
        for char in part:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


@contextmanager
def _lent_modules() -> Iterator[None]:
    """Stand-ins in sys.modules for the duration of one import."""
    lent = {"timm.models.layers": _module("timm.models.layers", DropPath=DropPath, Mlp=Mlp)}
    if "packaging" not in sys.modules and importlib.util.find_spec("packaging") is None:
        version = _module("packaging.version", parse=_version_key)
        lent |= {"packaging": _module("packaging", version=version), "packaging.version": version}
    lent = {name: module for name, module in lent.items() if name not in sys.modules}
    sys.modules.update(lent)
    try:
        yield
    finally:
        for name, module in lent.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_hiera() -> ModuleType:
    """FAIR's `hiera` package, imported without timm and without warnings.

    A `hiera` that is imported already is returned as it is. Raises ImportError if hiera-transformer is not
    installed.
    """
    with _LOCK:
        loaded = sys.modules.get("hiera")
        if loaded is not None:
            return loaded
        with _lent_modules():
            return importlib.import_module("hiera")
