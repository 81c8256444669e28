"""From a picture file to a normalised float32 array: modes, crops, resizing, flips.

Crops are chosen from the size in the file's header, before anything is decoded, so that a JPEG can be decoded
at 1/2, 1/4 or 1/8 of its resolution when the crop needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.data.hashing import Draws
from service.errors import UserError

_ORIENTATION_TAG = 0x0112
# What makes a picture with this EXIF orientation upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ASPECT_RANGE = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class View:
    """Box (left, upper, right, lower) in pixels of the upright picture, and whether it is mirrored."""

    box: tuple[float, float, float, float]
    flip: bool = False


def random_view(
    width: int, height: int, size: tuple[int, int], key: int, *, scale: tuple[float, float], flip: bool
) -> View:
    """RandomResizedCrop: an area of `scale` times the picture's, sides in a ratio of 3/4 to 4/3, anywhere.

    The ratio is relative to that of the output, `size` = (height, width). After ten boxes that do not fit,
    the largest centred one is taken. The same key gives the same view.
    """
    draws = Draws(key)
    mirrored = flip and draws.uniform() < 0.5
    shape = size[1] / size[0]
    for _ in range(10):
        area = width * height * draws.uniform(*scale)
        ratio = shape * math.exp(draws.uniform(math.log(_ASPECT_RANGE[0]), math.log(_ASPECT_RANGE[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = math.floor(draws.uniform() * (width - crop_width + 1))
            upper = math.floor(draws.uniform() * (height - crop_height + 1))
            return View((left, upper, left + crop_width, upper + crop_height), mirrored)
    return View(centre_view(width, height, size).box, mirrored)


def centre_view(width: int, height: int, size: tuple[int, int]) -> View:
    """The largest centred box with the sides' ratio of the output, `size` = (height, width)."""
    factor = min(width / size[1], height / size[0])
    crop_width, crop_height = size[1] * factor, size[0] * factor
    left, upper = (width - crop_width) / 2, (height - crop_height) / 2
    return View((left, upper, min(width, left + crop_width), min(height, upper + crop_height)))


def upright_size(picture: Image.Image) -> tuple[int, int]:
    """(width, height) once the orientation that the camera noted is applied; decodes nothing."""
    width, height = picture.size
    # Orientations 5 to 8 swap the sides.
    return (height, width) if _orientation(picture) >= 5 else (width, height)


def shrink_on_decode(picture: Image.Image, view: View, size: tuple[int, int]) -> None:
    """Let a JPEG's decoder deliver the smallest of 1/1, 1/2, 1/4, 1/8 whose view still covers `size`."""
    if picture.format not in ("JPEG", "MPO"):
        return
    left, upper, right, lower = view.box
    need = max(size[1] / (right - left), size[0] / (lower - upper))
    if need < 1:
        picture.draft(None, (math.ceil(picture.size[0] * need), math.ceil(picture.size[1] * need)))


def upright(picture: Image.Image, in_chans: int) -> Image.Image:
    """Decode, apply the camera's orientation, and convert to mode L (one channel) or RGB (three).

    Transparent pixels are laid over white; 16-bit and 32-bit integer greys are scaled from 0..65535,
    floating-point greys from 0..1 (or 0..255 when they exceed 1).
    """
    orientation = _orientation(picture)
    converted = _convert(picture, "L" if in_chans == 1 else "RGB")
    return converted.transpose(_TURNS[orientation]) if orientation > 1 else converted


def render(picture: Image.Image, view: View, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Cut out the view and resize it, bicubic with antialiasing. Returns uint8 [height, width, channels]."""
    resized = picture.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=view.box)
    if view.flip:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(resized)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


class Normalise:
    """(value / full_scale - mean) / std by channel, to contiguous float32 with channels first.

    Raises:
        UserError: mean or std has neither one value nor one a channel, or std is not positive.
    """

    def __init__(
        self,
        in_chans: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        full_scale: float = 1.0,
    ) -> None:
        mean_c = _per_channel("data.mean", mean, in_chans, 0.0)
        std_c = _per_channel("data.std", std, in_chans, 1.0)
        if not (std_c > 0).all():
            raise UserError("data.std: every value must be greater than 0")
        self._factor = (1.0 / (std_c * full_scale)).astype(np.float32)
        self._offset = (-mean_c / std_c).astype(np.float32)

    def __call__(self, channels_first: NDArray[np.generic]) -> NDArray[np.float32]:
        """[C, *size] of any real dtype -> float32 [C, *size]."""
        shape = (-1,) + (1,) * (channels_first.ndim - 1)
        out = np.empty(channels_first.shape, dtype=np.float32)
        np.multiply(channels_first, self._factor.reshape(shape), out=out, casting="same_kind")
        out += self._offset.reshape(shape)
        return out


def describe_failure(path: Path | str, error: BaseException) -> str:
    """One line for a log: the file and what its decoder said."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # Pillow's own message repeats the whole path.
    return f"{path}: {'not a picture' if 'cannot identify image file' in reason else reason}"


def _orientation(picture: Image.Image) -> int:
    if "exif" not in picture.info:
        return 1
    try:
        value = picture.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - garbled EXIF is common, and no reason to drop a picture
        return 1
    return value if value in _TURNS else 1


def _convert(picture: Image.Image, mode: str) -> Image.Image:
    if picture.mode.startswith(("I", "F")):
        grey = np.asarray(picture).astype(np.float32)
        peak = 65535.0
        if picture.mode == "F":
            peak = 1.0 if grey.max(initial=0.0) <= 1.0 else 255.0
        picture = Image.fromarray(np.rint(np.clip(grey / peak, 0, 1) * 255).astype(np.uint8))
    elif picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer)
    if picture.mode == mode:
        picture.load()
        return picture
    return picture.convert(mode)


def _per_channel(field: str, values: Sequence[float] | None, in_chans: int, default: float) -> NDArray[np.float64]:
    values = (default,) if values is None else values
    if len(values) not in (1, in_chans):
        raise UserError(
            f"{field} has {len(values)} values but model.in_chans is {in_chans}; give {in_chans}, one or null"
        )
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (in_chans,)).copy()
