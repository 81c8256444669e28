"""A kernel's module with one piece of its source exchanged, to prove that its tests can fail."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def broken_module(name: str, old: str, new: str) -> Any:
    """Module `name` executed anew with its only occurrence of `old` replaced by `new`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    module = ModuleType(f"broken_{name.rsplit('.', 1)[-1]}")
    module.__file__ = f"<{name} with {new}>"
    text = source.replace(old, new)
    # Triton and dataclasses look the source and the module up by name.
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module
