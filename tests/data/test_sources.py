"""Arrays, made-up samples and the photographs that packages ship."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.config.schema import DataSection, ModelSection
from service.data import open_data, photographs
from service.data.synthetic import SyntheticSource
from service.errors import EXIT_CONFIG, UserError

MODEL_1D = ModelSection(
    input_size=(64,),
    in_chans=5,
    q_stride=(2,),
    mask_unit_size=(8,),
    patch_kernel=(7,),
    patch_stride=(4,),
    patch_padding=(3,),
)


def save(path: Path, array: np.ndarray[Any, Any]) -> Path:
    with path.open("wb") as file:
        np.save(file, array)
    return path


def section(path: Path, **fields: object) -> DataSection:
    return DataSection.model_validate({"kind": "array", "path": path, "mean": None, "std": None, **fields})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", ">f4", "uint8"])
def test_every_row_is_read_once_as_it_is(dtype: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 200, (30, 5, 64)).astype(dtype)
    train, val = open_data(section(save(tmp_path / "x.npy", rows), val_fraction=0.2), MODEL_1D, seed=0)
    assert len(train) + len(val) == 30
    assert 1 <= len(val) <= 14
    read = [source.read(i, 0) for source in (train, val) for i in range(len(source))]
    assert all(x.dtype == np.float32 and x.shape == (5, 64) and x.flags.writeable for x in read)
    expected = rows.astype(np.float32) / (255 if dtype == "uint8" else 1)
    order = np.argsort([np.abs(expected - x).sum((1, 2)).argmin() for x in read])
    assert np.allclose(np.stack(read)[order], expected, rtol=1e-5)


def test_normalised_by_channel(tmp_path: Path) -> None:
    rows = np.ones((4, 5, 64), dtype=np.float32)
    data = section(save(tmp_path / "x.npy", rows), mean=(0, 1, 2, 3, 4), std=(2, 2, 2, 2, 2))
    train, _ = open_data(data, MODEL_1D, seed=0)
    assert train.read(0, 0)[:, 0].tolist() == [0.5, 0, -0.5, -1, -1.5]


@pytest.mark.parametrize("shape", [(3, 5, 64), (3, 2, 8, 6), (3, 1, 4, 8, 6)])
def test_one_two_and_three_dimensions_and_fortran_order(shape: tuple[int, ...], tmp_path: Path) -> None:
    rows = np.asfortranarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    model = ModelSection(input_size=shape[2:], in_chans=shape[1])
    path = save(tmp_path / "x.npy", rows)
    train, val = open_data(section(path, val_path=path), model, seed=0)
    assert len(train) == len(val) == 3
    assert np.array_equal(val.read(2, 0), rows[2])
    assert val.read(2, 0).flags.c_contiguous


def test_the_split_does_not_change_when_rows_are_appended(tmp_path: Path) -> None:
    rows = np.broadcast_to(np.arange(200, dtype=np.float32)[:, None, None], (200, 5, 64))
    held: list[set[float]] = []
    for count in (100, 200):
        path = save(tmp_path / f"{count}.npy", np.ascontiguousarray(rows[:count]))
        _, val = open_data(section(path, val_fraction=0.1), MODEL_1D, seed=count)
        held.append({float(val.read(i, 0)[0, 0]) for i in range(len(val))})
    assert held[0] == {value for value in held[1] if value < 100}


def test_a_samples_name_is_the_row_that_is_read(tmp_path: Path) -> None:
    rows = np.zeros((30, 5, 64), dtype=np.float32) + np.arange(30, dtype=np.float32)[:, None, None]
    path = save(tmp_path / "x.npy", rows)
    for fields in ({"val_fraction": 0.3}, {"val_path": path}, {"val_fraction": 0}):
        for source in open_data(section(path, **fields), MODEL_1D, seed=0):
            for index in range(0 if source is None else len(source)):
                assert source is not None
                assert source.name(index) == f"row {source.read(index, 0)[0, 0]:.0f} of {path}"


def write_pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def write_truncated(path: Path) -> None:
    save(path, np.zeros((4, 5, 64), dtype=np.float32))
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "is a folder"),
        (os.mkfifo, "is not a regular file"),
        (lambda p: p.write_bytes(b""), "is not a .npy file"),
        (lambda p: p.write_bytes(b"hello, this is text"), "is not a .npy file"),
        (
            lambda p: save(p, np.zeros((4, 5, 63), dtype=np.float32)),
            r"shape \[4, 5, 63\], but the model needs \[N, 5, 64\]",
        ),
        (lambda p: save(p, np.zeros((5, 64), dtype=np.float32)), r"shape \[5, 64\], but the model needs \[N, 5, 64\]"),
        (lambda p: save(p, np.zeros((4, 5, 64), dtype=np.complex64)), "holds '<c8'; convert it"),
        (lambda p: save(p, np.zeros((4, 5, 64), dtype=np.int64)), "holds '<i8'; convert it"),
        (lambda p: save(p, np.zeros((0, 5, 64), dtype=np.float32)), "holds no samples"),
        (lambda p: save(p, np.zeros((1, 5, 64), dtype=np.float32)), "holds one sample"),
        (write_pickled, r"holds '\|O'; convert it"),
        (write_truncated, "is truncated: 5148 bytes of 5248"),
    ],
)
def test_wrong_files(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    write(path)
    with pytest.raises(UserError, match=message) as caught:
        open_data(section(path), MODEL_1D, seed=0)
    assert caught.value.exit_code == EXIT_CONFIG
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_mean_must_fit_the_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.zeros((4, 5, 64), dtype=np.float32))
    with pytest.raises(UserError, match=r"data.mean has 3 values but model.in_chans is 5"):
        open_data(section(path, mean=(1, 2, 3), std=(1, 1, 1)), MODEL_1D, seed=0)


def test_synthetic_samples_repeat_from_the_seed_and_are_about_standard() -> None:
    source = SyntheticSource(10**9, (3, 32, 32), seed=1)
    assert len(source) == 10**9
    same = SyntheticSource(10, (3, 32, 32), seed=1)
    assert np.array_equal(source.read(5, 0), same.read(5, 1))
    assert not np.array_equal(source.read(5, 0), source.read(6, 0))
    assert not np.array_equal(source.read(5, 0), SyntheticSource(10, (3, 32, 32), seed=2).read(5, 0))
    pool = np.stack([source.read(i, 0) for i in range(64)])
    assert pool.dtype == np.float32
    assert abs(pool.mean()) < 0.1
    assert pool.std() == pytest.approx(1, abs=0.1)


def test_synthetic_validation_differs_from_training() -> None:
    train, val = open_data(DataSection(kind="synthetic", synthetic_samples=100), MODEL_1D, seed=0)
    assert len(train) == len(val) == 100
    assert train.read(0, 0).shape == (5, 64)
    assert not any(np.array_equal(train.read(i, 0), val.read(0, 0)) for i in range(64))


needs_photographs = pytest.mark.skipif(
    importlib.util.find_spec("skimage") is None or importlib.util.find_spec("sklearn") is None,
    reason="needs the quickstart extra",
)


@needs_photographs
def test_every_builtin_photograph_is_there() -> None:
    """A release of scikit-image that drops one from its wheel should be noticed here, not by a new user."""
    assert len(photographs.load(photographs.TRAIN, 3)) == len(photographs.TRAIN)
    assert len(photographs.load(photographs.HELD_OUT, 3)) == len(photographs.HELD_OUT)
    assert not set(photographs.TRAIN) & set(photographs.HELD_OUT)


@needs_photographs
def test_photographs_give_many_crops() -> None:
    model, data = ModelSection(input_size=(32, 32)), DataSection(path=Path("builtin:photographs"))
    train, val = open_data(data, model, seed=0)
    assert len(train) == len(photographs.TRAIN) * photographs.TRAIN_CROPS
    assert not np.array_equal(train.read(0, 1), train.read(0, 2))
    count = len(photographs.HELD_OUT)
    assert np.array_equal(val.read(count, 1), val.read(count, 2))
    assert not np.array_equal(val.read(0, 1), val.read(count, 1))
    other_val = open_data(data, model, seed=9)[1]
    assert np.array_equal(val.read(7, 0), other_val.read(7, 0))


def test_photographs_without_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hiera-train\[quickstart\]'"):
        open_data(DataSection(path=Path("builtin:photographs")), ModelSection(), seed=0)
