"""Whether the data of a configuration is there and has the right shape, without decoding any of it.

The launcher asks before it starts anything, and `service.data` again where the data is opened, on every node.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import struct
from pathlib import Path
from typing import NamedTuple

from service.config.schema import BUILTIN, DataSection, ModelSection, RunConfig
from service.errors import UserError

ARRAY_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float64", "u1": "uint8", "i2": "int16"}
"""numpy type codes, without byte order, that can be training data."""
PICTURE_CHANNELS = (1, 3)
PHOTOGRAPHS = f"{BUILTIN}photographs"
_PHOTOGRAPH_PACKAGES = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 20


class ArrayHeader(NamedTuple):
    """What a .npy file says about itself."""

    descr: str
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int


def check_data(config: RunConfig) -> None:
    """data.path and data.val_path exist, can be read and fit the model. UserError, one line."""
    data, model = config.data, config.model
    if data.kind == "synthetic":
        return
    for field, path in (("data.path", data_path(data)), ("data.val_path", data.val_path)):
        if path is None:
            continue
        if str(path).startswith(BUILTIN):
            _check_builtin(field, data.kind, str(path))
        elif data.kind == "images":
            check_folder(field, path)
        else:
            check_array(field, path, (model.in_chans, *model.input_size))


def data_path(data: DataSection) -> Path:
    """data.path, which no kind but synthetic can do without. UserError, one line."""
    if data.path is None:
        thing = "a folder of pictures" if data.kind == "images" else "a .npy file"
        raise UserError(f"data.path: null, but data.kind {data.kind} needs {thing}; add --set data.path=...")
    return data.path


def check_pictures_fit(model: ModelSection) -> None:
    """Pictures can be samples of this model. UserError, one line."""
    if len(model.input_size) != 2:
        raise UserError(
            f"data.kind: images are 2-D, model.input_size {list(model.input_size)} is {len(model.input_size)}-D; "
            "use data.kind=array"
        )
    if model.in_chans not in PICTURE_CHANNELS:
        raise UserError(
            f"model.in_chans: {model.in_chans}, but pictures give 1 (grey) or 3 channels; use data.kind=array"
        )


def _check_there(field: str, path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        raise UserError(f"{field}: {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read: {error.strerror}") from None


def _check_builtin(field: str, kind: str, name: str) -> None:
    if kind != "images" or name != PHOTOGRAPHS:
        raise UserError(f"{field}: {name} is unknown; data.kind images has {PHOTOGRAPHS}")
    missing = [package for module, package in _PHOTOGRAPH_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"{field}: {name} needs {' and '.join(missing)}: pip install 'hiera-train[quickstart]'")


def check_folder(field: str, path: Path) -> None:
    """A folder that can be listed and is not empty. UserError, one line."""
    _check_there(field, path)
    if not path.is_dir():
        raise UserError(f"{field}: {path} is a file; data.kind images needs a folder of pictures")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{field}: {path} cannot be read: permission denied")
    with os.scandir(path) as entries:
        if next(entries, None) is None:
            raise UserError(f"{field}: {path} is empty")


def check_array(field: str, path: Path, sample: tuple[int, ...]) -> None:
    """A whole .npy file of numbers, of shape [N, *sample]. UserError, one line."""
    _check_there(field, path)
    if path.is_dir():
        raise UserError(f"{field}: {path} is a folder; data.kind array needs a .npy file")
    if not path.is_file():
        # To open a named pipe would wait for its writer.
        raise UserError(f"{field}: {path} is not a regular file; data.kind array needs a .npy file")
    try:
        header = read_array_header(path)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{field}: {path} {error}") from None
    code = header.descr[1:] if header.descr[:1] in "<>|=" else header.descr
    if code not in ARRAY_DTYPES:
        wanted = ", ".join(ARRAY_DTYPES.values())
        raise UserError(f"{field}: {path} holds {header.descr!r}; convert it to one of {wanted}")
    if header.shape[1:] != sample:
        wanted = ", ".join(map(str, ("N", *sample)))
        raise UserError(
            f"{field}: {path} has shape {list(header.shape)}, but the model needs [{wanted}] "
            "(N, model.in_chans, *model.input_size)"
        )
    if header.shape[0] < 1:
        raise UserError(f"{field}: {path} holds no samples")
    whole = header.offset + int(code[1:])
    for length in header.shape:
        whole = header.offset + (whole - header.offset) * length
    if size < whole:
        raise UserError(f"{field}: {path} is truncated: {size} bytes of {whole}")


def read_array_header(path: Path) -> ArrayHeader:
    """Header of a .npy file, versions 1 to 3. ValueError if it is not one, OSError if it cannot be read."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8 or start[:6] != _MAGIC:
            raise ValueError("is not a .npy file")
        major = start[6]
        if major not in (1, 2, 3):
            raise ValueError(f"is a .npy file of the unknown version {major}")
        width, code = (2, "<H") if major == 1 else (4, "<I")
        field = file.read(width)
        length = struct.unpack(code, field)[0] if len(field) == width else _MAX_HEADER + 1
        text = file.read(length) if length <= _MAX_HEADER else b""
        if len(text) != length:
            raise ValueError("is a .npy file with a broken header")
        offset = file.tell()
    try:
        header = ast.literal_eval(text.decode("latin1" if major < 3 else "utf-8").strip())
        shape = tuple(int(length) for length in header["shape"])
        return ArrayHeader(str(header["descr"]), shape, bool(header["fortran_order"]), offset)
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        raise ValueError("is a .npy file with a broken header") from None
