"""Input pipeline: data sources, and one endless stream of global sample numbers over them.

`open_data` turns the data section into a training and a validation source; `Stream` feeds training from any
step on, on any number of ranks; `validation` gives the fixed held-out batches.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from service.config.data_checks import PHOTOGRAPHS, check_pictures_fit, data_path
from service.config.schema import DataSection, ModelSection
from service.data import hashing
from service.data.array import ArraySource, normalise_for, open_array
from service.data.images import BadFiles, ImageSource, list_pictures, split_by_name
from service.data.photographs import HELD_OUT, TRAIN, PhotographSource, load
from service.data.source import Source, held_out
from service.data.stream import Stream, source_index, validation
from service.data.synthetic import SyntheticSource
from service.data.transforms import Normalise
from service.errors import UserError

__all__ = ["Source", "Stream", "open_data", "source_index", "validation"]

_SYNTHETIC_VAL_SAMPLES = 4096


def open_data(data: DataSection, model: ModelSection, *, seed: int) -> tuple[Source, Source | None]:
    """Open training and validation data: samples are float32 [in_chans, *input_size].

    The split depends on file names (pictures) or row numbers (arrays), never on the seed. The validation
    source is None when data.val_path is not set and data.val_fraction is 0.

    Raises:
        UserError: the data is missing, empty, unreadable or does not fit the model; the message names the
            field.
    """
    if data.kind == "synthetic":
        shape = (model.in_chans, *model.input_size)
        val_length = min(data.synthetic_samples, _SYNTHETIC_VAL_SAMPLES)
        return (
            SyntheticSource(data.synthetic_samples, shape, seed),
            SyntheticSource(val_length, shape, hashing.derive(seed, hashing.VALIDATION)),
        )
    if data.kind == "array":
        return _open_arrays(data, model, data_path(data))
    return _open_pictures(data, model, data_path(data))


def _open_pictures(data: DataSection, model: ModelSection, path: Path) -> tuple[Source, Source | None]:
    check_pictures_fit(model)
    size = model.input_size[0], model.input_size[1]
    normalise = Normalise(model.in_chans, data.mean, data.std, full_scale=255.0)
    # Garbled EXIF is common and harmless: only the orientation is read from it.
    warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning)
    bad = BadFiles(data.max_bad_files)

    def files(root: Path, names: list[str], train: bool) -> Source:
        return ImageSource(
            root,
            names,
            size,
            normalise,
            bad,
            in_chans=model.in_chans,
            train=train,
            scale=data.crop_scale,
            flip=data.flip,
        )

    def photographs(train: bool) -> Source:
        pictures = load(TRAIN if train else HELD_OUT, model.in_chans)
        return PhotographSource(pictures, size, normalise, train=train, scale=data.crop_scale, flip=data.flip)

    builtin = str(path) == PHOTOGRAPHS
    names = [] if builtin else list_pictures(path)
    if data.val_path is not None:
        train = photographs(True) if builtin else files(path, names, True)
        if str(data.val_path) == PHOTOGRAPHS:
            return train, photographs(False)
        return train, files(data.val_path, list_pictures(data.val_path, "data.val_path"), False)
    if builtin:
        return photographs(True), None if data.val_fraction == 0 else photographs(False)
    if data.val_fraction == 0:
        return files(path, names, True), None
    train_names, val_names = split_by_name(names, data.val_fraction, path)
    return files(path, train_names, True), files(path, val_names, False)


def _open_arrays(data: DataSection, model: ModelSection, path: Path) -> tuple[Source, Source | None]:
    shape = (model.in_chans, *model.input_size)
    rows = open_array(path, shape)
    normalise = normalise_for(rows, model.in_chans, data.mean, data.std)
    if data.val_path is not None:
        val_rows = open_array(data.val_path, shape, "data.val_path")
        val_normalise = normalise_for(val_rows, model.in_chans, data.mean, data.std)
        return ArraySource(path, rows, normalise), ArraySource(data.val_path, val_rows, val_normalise)
    if data.val_fraction == 0:
        return ArraySource(path, rows, normalise), None
    if len(rows) < 2:
        raise UserError(
            f"data.path: {path} holds one sample, and one is held out for validation; add some or set data.val_path"
        )
    numbers = np.arange(len(rows), dtype=np.int64)
    is_val = held_out(hashing.uniform_floats(hashing.derive(hashing.VALIDATION), numbers), data.val_fraction)
    train_rows, val_rows = numbers[~is_val], numbers[is_val]
    return ArraySource(path, rows, normalise, train_rows), ArraySource(path, rows, normalise, val_rows)
