"""Data that is missing, of another kind or of another shape is found without decoding it."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from service.config.checks import check_all
from service.config.data_checks import check_data, read_array_header
from service.config.load import load_config
from service.errors import UserError

SIGNAL = ["model.in_chans=2", "model.mask_ratio=0.5"]


def message(config_name, *overrides) -> str:
    config = load_config(config_name, overrides)
    with pytest.raises(UserError) as error:
        check_data(config)
    return str(error.value)


def array_config(path, *more):
    return load_config("eeg-1d", [*SIGNAL, "model.input_size=256", f"data.path={path}", *more])


def array_message(path, *more) -> str:
    with pytest.raises(UserError) as error:
        check_data(array_config(path, *more))
    return str(error.value)


def test_synthetic_data_needs_no_path():
    check_all(load_config("base", ["data.kind=synthetic"]))


def test_a_path_is_needed():
    assert (
        message("base") == "data.path: null, but data.kind images needs a folder of pictures; add --set data.path=..."
    )
    assert message("eeg-1d") == "data.path: null, but data.kind array needs a .npy file; add --set data.path=..."


def test_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.png").write_text("x")
    assert message("base", f"data.path={tmp_path}/no") == f"data.path: {tmp_path}/no does not exist"
    assert message("base", f"data.path={tmp_path}/empty") == f"data.path: {tmp_path}/empty is empty"
    assert (
        message("base", f"data.path={tmp_path}/file")
        == f"data.path: {tmp_path}/file is a file; data.kind images needs a folder of pictures"
    )
    assert (
        message("base", f"data.path={tmp_path}/file/x")
        == f"data.path: {tmp_path}/file/x cannot be read: Not a directory"
    )
    assert (
        message("base", f"data.path={tmp_path}/full", f"data.val_path={tmp_path}/empty")
        == f"data.val_path: {tmp_path}/empty is empty"
    )
    check_all(load_config("base", [f"data.path={tmp_path}/full"]))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    assert (
        message("base", f"data.path={tmp_path}/closed")
        == f"data.path: {tmp_path}/closed cannot be read: permission denied"
    )


def test_builtin_photographs(monkeypatch):
    name = "data.path=builtin:photographs"
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    check_data(load_config("base", [name]))
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module == "skimage" else object())
    assert (
        message("base", name)
        == "data.path: builtin:photographs needs scikit-image: pip install 'hiera-train[quickstart]'"
    )
    unknown = "is unknown; data.kind images has builtin:photographs"
    assert message("base", "data.path=builtin:cats") == f"data.path: builtin:cats {unknown}"
    assert message("eeg-1d", name) == f"data.path: builtin:photographs {unknown}"


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "f8", "u1", "<i2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_header_is_what_numpy_wrote(tmp_path, dtype, order):
    array = np.zeros((3, 2, 256), dtype=dtype, order=order)
    np.save(tmp_path / "x.npy", array)
    header = read_array_header(tmp_path / "x.npy")
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.dtype(header.descr) == array.dtype
    assert header.shape == array.shape
    assert header.fortran_order is (order == "F")
    assert header.offset == mapped.offset
    check_data(array_config(tmp_path / "x.npy"))


@pytest.mark.filterwarnings("ignore:Stored array in format")
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_the_format(tmp_path, version):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, np.zeros((1, 2, 256), "f4"), version=version)
    assert read_array_header(tmp_path / "x.npy").shape == (1, 2, 256)


def test_arrays_that_do_not_fit(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 4, 256), "f4"))
    shape = "but the model needs [N, 2, 256] (N, model.in_chans, *model.input_size)"
    assert array_message(path) == f"data.path: {path} has shape [3, 4, 256], {shape}"
    np.save(path, np.zeros((3, 256), "f4"))
    assert array_message(path) == f"data.path: {path} has shape [3, 256], {shape}"
    np.save(path, np.float32(1))
    assert array_message(path) == f"data.path: {path} has shape [], {shape}"
    np.save(path, np.zeros((0, 2, 256), "f4"))
    assert array_message(path) == f"data.path: {path} holds no samples"
    wanted = "convert it to one of float16, float32, float64, uint8, int16"
    for dtype, descr in (("c8", "<c8"), ("?", "|b1"), ("U3", "<U3"), ("i8", "<i8")):
        np.save(path, np.zeros((3, 2, 256), dtype))
        assert array_message(path) == f"data.path: {path} holds {descr!r}; {wanted}"
    np.save(path, np.empty((3, 2, 256), object), allow_pickle=True)
    assert array_message(path) == f"data.path: {path} holds '|O'; {wanted}"
    assert array_message(tmp_path) == f"data.path: {tmp_path} is a folder; data.kind array needs a .npy file"
    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    assert array_message(pipe) == f"data.path: {pipe} is not a regular file; data.kind array needs a .npy file"


def test_a_truncated_array(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 2, 256), "f4"))
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    assert array_message(path) == f"data.path: {path} is truncated: {whole - 1} bytes of {whole}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a .npy file"),
        (b"PK\x03\x04aaaaaaaaaaaa", "is not a .npy file"),
        (b"\x93NUMPY\x09\x00aaaa", "is a .npy file of the unknown version 9"),
        (b"\x93NUMPY\x01\x00", "is a .npy file with a broken header"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 100) + b"{}", "is a .npy file with a broken header"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 2) + b"{}", "is a .npy file with a broken header"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 4) + b"[[[[", "is a .npy file with a broken header"),
        (
            b"\x93NUMPY\x01\x00" + struct.pack("<H", 11) + b"__import__(",
            "is a .npy file with a broken header",
        ),
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1), "is a .npy file with a broken header"),
    ],
)
def test_files_that_are_not_arrays(tmp_path, content, problem):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    assert array_message(path) == f"data.path: {path} {problem}"


def test_what_a_run_starts_from_is_looked_for_unless_it_has_checkpoints(tmp_path):
    def refusal(path) -> str:
        overrides = ["data.kind=synthetic", f"run.dir={tmp_path}/run", f"train.init_from={path}"]
        with pytest.raises(UserError) as error:
            check_all(load_config("base", overrides))
        return str(error.value)

    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_text("x")
    assert refusal(tmp_path / "no") == f"train.init_from: {tmp_path}/no does not exist"
    assert "is not a run directory with checkpoints" in refusal(tmp_path / "empty")
    assert "must end in .pth or .safetensors" in refusal(tmp_path / "weights.bin")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001.safetensors").write_text("x")
    check_all(load_config("base", ["data.kind=synthetic", f"run.dir={tmp_path}/run", f"train.init_from={tmp_path}/no"]))
    check_all(load_config("base", ["data.kind=synthetic", f"train.init_from={tmp_path}/run"]))
