"""Whether torch's CUDA allocator runs with the settings that the launcher asked for.

A library that allocates first, or a torch that reads only one of the two variables, would otherwise drop
them silently, and the run would fragment or hang much later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from service.config.allocator import split_settings
from service.errors import UserError
from service.launch.environment import ALLOCATOR_VARIABLES


def verify_allocator() -> None:
    """Compares what torch's allocator reports, as far as it does, with the environment.

    Raises:
        UserError: they differ.
    """
    wanted, older = (os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    if wanted != older:
        raise UserError(f"{' and '.join(ALLOCATOR_VARIABLES)} differ: {wanted!r} and {older!r}")
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    found = wanted if getter is None else getter()
    if found != wanted:
        raise UserError(f"the allocator runs with {found!r} instead of {wanted!r}")
    if torch.cuda.is_available():
        check_reported(wanted, reported_settings())


def reported_settings() -> dict[str, Any]:
    """What the CUDA allocator says of itself: `backend`, and of the native one its parsed settings."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    backend = torch.cuda.get_allocator_backend()
    # The driver's pool keeps no such records and raises.
    snapshot = torch.cuda.memory._snapshot() if backend == "native" else {}
    return {"backend": backend, **snapshot.get("allocator_settings", {})}


def check_reported(wanted: str, reported: Mapping[str, Any]) -> None:
    """Compares a settings string with the allocator's parsed values.

    Args:
        wanted: as in PYTORCH_ALLOC_CONF.
        reported: `backend`, `expandable_segments` (bool), `max_split_size` (bytes), where known.

    Raises:
        UserError: one differs; the message names it.
    """
    for item in split_settings(wanted):
        option, _, value = (part.strip() for part in item.partition(":"))
        expected: object
        if option == "expandable_segments":
            expected = value.lower() == "true"
        elif option == "max_split_size_mb":
            option, expected = "max_split_size", int(value) * 1024 * 1024
        elif option == "backend":
            expected = value
        else:
            continue
        if option in reported and reported[option] != expected:
            raise UserError(
                f"the allocator reports {option}={reported[option]}, but {ALLOCATOR_VARIABLES[0]} asks for {item}"
            )
