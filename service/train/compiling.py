"""Counts what Triton compiles and what it finds in its persistent cache, by the listener it offers."""

from __future__ import annotations

from typing import Any


class CompileWatch:
    """Kernels of this process so far; all zero until `install`."""

    def __init__(self) -> None:
        self.hits = 0
        """Kernels found in the cache."""
        self.misses = 0
        """Kernels compiled."""
        self._next: Any = None

    def install(self) -> CompileWatch:
        """Starts to count; a listener that is there already is still called."""
        from triton import knobs

        self._next = knobs.compilation.listener
        knobs.compilation.listener = self
        return self

    def __call__(self, *, cache_hit: bool, **details: Any) -> None:
        """Triton's CompilationListener: one kernel is ready."""
        if cache_hit:
            self.hits += 1
        else:
            self.misses += 1
        if self._next is not None:
            self._next(cache_hit=cache_hit, **details)
