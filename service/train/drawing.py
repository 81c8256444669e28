"""Samples as picture files: originals, what the model saw, and what it made of it, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from service.errors import UserError
from service.files import replacing

TITLES = ("original", "masked", "reconstructed")
MAX_FRAMES = 4
"""Frames drawn of a clip, evenly spaced."""
MAX_CHANNELS = 6
"""Channels drawn of a signal, the first ones."""

_GAP, _HEADER = 4, 18
_HIDDEN = 128
_LINE_HEIGHT, _LINE_WIDTH = 44, 420
_INK, _PALE, _SHADE, _MADE = (30, 30, 30), (190, 190, 190), (238, 232, 220), (200, 60, 20)

Pixels = NDArray[np.uint8]


def draw_samples(
    original: NDArray[np.float32], reconstructed: NDArray[np.float32], hidden: NDArray[np.bool_]
) -> Image.Image:
    """One row a sample (and drawn frame): original, masked, reconstructed.

    Args:
        original: float32 [B, C, *size], not normalised. Pictures and clips are shown as they are when their
            values lie in 0..1, else stretched to the sample's range; three channels are red, green and
            blue, of any other number the first is shown in grey.
        reconstructed: the same shape.
        hidden: bool [B, *size], True where the model saw nothing.
    """
    rows: list[Sequence[Pixels]] = []
    for sample, made, mask in zip(original, reconstructed, hidden, strict=True):
        if sample.ndim == 2:
            rows.append(_draw_signal(sample, made, mask))
        elif sample.ndim == 3:
            rows.append(_draw_picture(sample, made, mask, _value_range(sample)))
        else:
            span = _value_range(sample)
            frames = sample.shape[1]
            for t in np.unique(np.linspace(0, frames - 1, min(frames, MAX_FRAMES)).round().astype(int)):
                rows.append(_draw_picture(sample[:, t], made[:, t], mask[t], span))
    return _table(rows)


def save_png(picture: Image.Image, path: Path) -> None:
    """Write the file whole or not at all.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            picture.save(temporary, format="PNG")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _value_range(sample: NDArray[np.float32]) -> tuple[float, float]:
    low, high = float(sample.min()), float(sample.max())
    # Normalising and back is inexact in the last bits.
    if low >= -1e-3 and high <= 1 + 1e-3:
        return 0.0, 1.0
    return low, max(high, low + 1e-12)


def _draw_picture(
    sample: NDArray[np.float32], made: NDArray[np.float32], mask: NDArray[np.bool_], span: tuple[float, float]
) -> Sequence[Pixels]:
    first, last = _to_pixels(sample, span), _to_pixels(made, span)
    seen = np.where(mask[:, :, None], np.uint8(_HIDDEN), first)
    return [_enlarge(tile) for tile in (first, seen, last)]


def _to_pixels(sample: NDArray[np.float32], span: tuple[float, float]) -> Pixels:
    channels = sample if len(sample) == 3 else np.repeat(sample[:1], 3, axis=0)
    scaled = (channels - span[0]) / (span[1] - span[0])
    pixels: Pixels = np.rint(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    return pixels.transpose(1, 2, 0)


def _enlarge(tile: Pixels) -> Pixels:
    """Small samples are enlarged by a whole factor, to about 200 pixels."""
    height, width = tile.shape[:2]
    factor = max(1, round(200 / max(height, width)))
    if factor == 1:
        return tile
    size = (width * factor, height * factor)
    return np.asarray(Image.fromarray(tile).resize(size, Image.Resampling.BICUBIC))


def _draw_signal(sample: NDArray[np.float32], made: NDArray[np.float32], mask: NDArray[np.bool_]) -> Sequence[Pixels]:
    """Lines, one below the other, a channel each; hidden stretches shaded, what was made in colour."""
    channels, length = min(len(sample), MAX_CHANNELS), sample.shape[1]
    x = np.arange(length) * (_LINE_WIDTH - 1) / max(1, length - 1)
    # Each channel fills its strip; what was made may leave it, but not by more than half a strip.
    low = sample[:channels].min(axis=1, keepdims=True)
    span = np.maximum(sample[:channels].max(axis=1, keepdims=True) - low, 1e-12)
    base = _LINE_HEIGHT * np.arange(1, channels + 1)[:, None] - 6

    def points(values: NDArray[np.float32], c: int, start: int, stop: int) -> list[tuple[float, float]]:
        relative = np.clip((values[:channels] - low) / span, -0.5, 1.5)
        y = base - relative * (_LINE_HEIGHT - 12)
        return list(zip(x[start:stop].tolist(), y[c, start:stop].tolist(), strict=True))

    tiles = []
    for title in TITLES:
        tile = Image.new("RGB", (_LINE_WIDTH, channels * _LINE_HEIGHT), "white")
        draw = ImageDraw.Draw(tile)
        shown = np.zeros_like(mask) if title == "original" else mask
        for start, stop in _runs(shown):
            draw.rectangle((x[start], 0, x[stop - 1], tile.height), fill=_SHADE)
        for c in range(channels):
            for start, stop in _runs(~shown):
                draw.line(points(sample, c, start, stop), fill=_INK)
            for start, stop in _runs(shown) if title == "reconstructed" else []:
                draw.line(points(sample, c, start, stop), fill=_PALE)
                draw.line(points(made, c, start, stop), fill=_MADE)
        tiles.append(np.asarray(tile, dtype=np.uint8))
    return tiles


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, stop) of every unbroken stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _table(rows: Sequence[Sequence[Pixels]]) -> Image.Image:
    height, width = rows[0][0].shape[:2]
    table = Image.new(
        "RGB",
        (len(TITLES) * (width + _GAP) - _GAP, _HEADER + len(rows) * (height + _GAP) - _GAP),
        "white",
    )
    draw = ImageDraw.Draw(table)
    for column, title in enumerate(TITLES):
        draw.text((column * (width + _GAP) + 2, 3), title, fill=_INK)
    for number, row in enumerate(rows):
        for column, tile in enumerate(row):
            place = (column * (width + _GAP), _HEADER + number * (height + _GAP))
            table.paste(Image.fromarray(tile), place)
    return table
