"""`data.path: builtin:photographs`: the photographs that scikit-image and scikit-learn ship, for a first
run without data.

A dozen pictures of 300 to 1,400 pixels. They are decoded once and kept in memory, and an epoch is many
random crops of each. Some of scikit-image's pictures are downloaded on demand; only those that its wheel
contains are used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.config.data_checks import PHOTOGRAPHS
from service.data import hashing
from service.data.transforms import Normalise, random_view, render, upright
from service.errors import UserError

TRAIN = (
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("skimage", "data/ihc.png"),
    # The two halves of a stereo pair: on the same side of the split.
    ("skimage", "data/motorcycle_left.png"),
    ("skimage", "data/motorcycle_right.png"),
    ("skimage", "data/retina.jpg"),
    ("skimage", "data/camera.png"),
    ("skimage", "data/coins.png"),
    ("skimage", "data/moon.png"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
)
# Everyday photographs in the public domain (CC0): their reconstructions may be shown anywhere.
HELD_OUT = (
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/rocket.jpg"),
)
TRAIN_CROPS = 128
"""Random crops of each photograph in an epoch."""
VAL_CROPS = 32
"""Crops of each held-out photograph, the same in every run."""


def load(entries: tuple[tuple[str, str], ...], in_chans: int) -> list[Image.Image]:
    """Decode those of the photographs that are installed.

    Raises:
        UserError: none is.
    """
    pictures = []
    for package, name in entries:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin).parent / name
        if path.is_file():
            with Image.open(path) as picture:
                pictures.append(upright(picture, in_chans))
    if not pictures:
        raise UserError(
            f"data.path: {PHOTOGRAPHS} needs scikit-image and scikit-learn; "
            "install them with pip install 'hiera-train[quickstart]'"
        )
    return pictures


class PhotographSource:
    """Random crops of a few photographs in memory; sample `index` shows photograph `index % count`.

    Validation crops come from the index alone, so they are the same whatever the seed.
    """

    bad_files = 0

    def __init__(
        self,
        pictures: list[Image.Image],
        size: tuple[int, int],
        normalise: Normalise,
        *,
        train: bool,
        scale: tuple[float, float],
        flip: bool,
    ) -> None:
        self._pictures, self._size, self._normalise = pictures, size, normalise
        self._train, self._scale, self._flip = train, scale, flip

    def __len__(self) -> int:
        return len(self._pictures) * (TRAIN_CROPS if self._train else VAL_CROPS)

    def read(self, index: int, key: int) -> NDArray[np.float32]:
        """See `Source.read`."""
        picture = self._pictures[index % len(self._pictures)]
        if not self._train:
            key = hashing.derive(hashing.VALIDATION, index)
        view = random_view(
            picture.width, picture.height, self._size, key, scale=self._scale, flip=self._flip and self._train
        )
        return self._normalise(render(picture, view, self._size).transpose(2, 0, 1))

    def name(self, index: int) -> str:
        """See `Source.name`."""
        return f"photograph {index % len(self._pictures)} of {PHOTOGRAPHS}"
