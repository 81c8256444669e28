"""runtime.allocator: presets of the CUDA caching allocator, and what else torch takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

PRESETS: dict[str, str] = {
    # torch's own defaults.
    "default": "",
    # Large blocks are not split, segments grow in place: the least fragmentation at large micro-batches.
    "large-batch": "max_split_size_mb:512,expandable_segments:True",
    # NCCL's registration of captured buffers hangs with expandable segments (pytorch#158029, nccl#2389).
    "captured-ddp": "expandable_segments:False",
    # The driver's own pool, which compute-sanitizer can follow; slower.
    "debug": "backend:cudaMallocAsync",
}
OPTIONS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    }
)
"""Options of PYTORCH_ALLOC_CONF in torch 2.11 to 2.14."""


def allocator_settings(allocator: str) -> str:
    """PYTORCH_ALLOC_CONF's value for a preset, or for a string in that variable's own syntax, checked.

    Raises:
        ValueError: it is neither; one line.
    """
    if allocator in PRESETS:
        return PRESETS[allocator]
    if ":" not in allocator:
        near = get_close_matches(allocator, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "write option:value,... or a preset"
        raise ValueError(f"{allocator!r} is not a preset ({', '.join(PRESETS)}); {hint}")
    for item in split_settings(allocator):
        match = re.fullmatch(r"\s*([a-z_0-9]+)\s*:\s*(\[[^\]\s]+\]|[A-Za-z0-9_.]+)\s*", item)
        if match is None:
            raise ValueError(f"{item!r} is not option:value")
        if match[1] not in OPTIONS:
            near = get_close_matches(match[1], OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(OPTIONS))}"
            raise ValueError(f"torch's allocator has no option {match[1]}; {hint}")
    return allocator


def split_settings(settings: str) -> Iterator[str]:
    """The items "option:value" of a settings string."""
    # Commas inside brackets belong to one value: roundup_power2_divisions:[256:1,512:2].
    yield from re.split(r",(?![^\[]*\])", settings)
