"""Checkpoints: one safetensors file each, whole or absent.

A file is written under a temporary name in the same folder, fsynced and renamed, so a reader never sees half
of one. Disks and network file systems still lose or damage tails of files after a crash, so each file also
carries a CRC-32 of everything in it, and loading takes the newest file that passes.

Layout: safetensors (https://github.com/huggingface/safetensors, "Format"), written here tensor by tensor
because the library's own writer makes a second copy of all bytes in memory. Keys are `model.<name>` for
weights (fp32) and `optim.<slot>.<name>` for optimizer state; the header's `__metadata__` holds `crc32` and
`meta` (JSON).
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from hiera_optim.state_dict import only_input_size_differs
from service.errors import UserError
from service.files import replacing

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_CRC = re.compile(rb'"crc32":"([0-9a-f]{8})"')
_CHUNK = 16 << 20
_MAX_HEADER = 100 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedCheckpoint(Exception):
    """The file is not a whole checkpoint; the message says in a few words why."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return folder / f"step-{step:08d}.safetensors"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of each checkpoint in `folder`, oldest first; damaged ones are not told apart."""
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted(found)


# -- writing -----------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Writes CPU tensors and JSON-able `meta` to `path`, atomically and durably.

    Raises:
        OSError: the disk is full or fails; nothing is left behind, an older file of that name is untouched.
    """
    # Widest dtype first keeps every tensor aligned to its item size, as the format's readers prefer.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"crc32": "0" * 8, "meta": json.dumps(meta, sort_keys=True)}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    prefix = struct.pack("<Q", len(header))
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(prefix + header)
        crc = zlib.crc32(header, zlib.crc32(prefix))
        for name in names:
            for chunk in _chunks(tensors[name]):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
        match = _CRC.search(header)
        assert match is not None
        file.seek(len(prefix) + match.start(1))
        file.write(f"{crc:08x}".encode())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _chunks(tensor: Tensor) -> Iterable[memoryview]:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(flat)
    for start in range(0, len(view), _CHUNK):
        yield view[start : start + _CHUNK]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder; the rename is then as durable as they make it.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of killed writers. Call only while no other process writes to `folder`."""
    for path in folder.glob(".step-*.tmp"):
        path.unlink(missing_ok=True)


# -- reading -----------------------------------------------------------------------------------------------


def verify(path: Path) -> None:
    """Reads the whole file and compares lengths and checksum.

    Raises:
        DamagedCheckpoint: it is not whole.
        OSError: it cannot be read at all.
    """
    if path.exists() and not path.is_file():
        # To open a named pipe would wait for its writer.
        raise OSError("not a regular file")
    with open(path, "rb") as file:
        header, entries = _read_header(file)
        crc_field = _CRC.search(header)
        if crc_field is None:
            raise DamagedCheckpoint("no checksum in the header")
        try:
            ends = [int(e["data_offsets"][1]) for name, e in entries.items() if name != "__metadata__"]
        except (LookupError, TypeError, ValueError):
            raise DamagedCheckpoint("its header is cut or garbled") from None
        expected, actual = 8 + len(header) + max(ends, default=0), os.fstat(file.fileno()).st_size
        if actual != expected:
            raise DamagedCheckpoint(f"{actual} of {expected} bytes")
        blank = header[: crc_field.start(1)] + b"0" * 8 + header[crc_field.end(1) :]
        crc = zlib.crc32(blank, zlib.crc32(struct.pack("<Q", len(header))))
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    if f"{crc:08x}".encode() != crc_field.group(1):
        raise DamagedCheckpoint("its checksum does not match")


def _read_header(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise DamagedCheckpoint(f"only {len(prefix)} bytes")
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER:
        raise DamagedCheckpoint("no safetensors header")
    header = file.read(length)
    try:
        entries = json.loads(header)
        return header, {str(k): v for k, v in entries.items()}
    except (ValueError, AttributeError):
        raise DamagedCheckpoint("its header is cut or garbled") from None


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON that was stored with the tensors: step, samples, model, versions, ..."""
    with open(path, "rb") as file:
        _, entries = _read_header(file)
    meta: dict[str, Any] = json.loads(entries["__metadata__"]["meta"])
    if meta.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {meta.get('format')}; this version reads {FORMAT}")
    return meta


def _check_name(path: Path, step: int) -> None:
    """Raises DamagedCheckpoint when the file, though whole, is of another step than its name says: a copy or
    renamed by hand. Training would take its weights for the later ones.
    """
    held = read_meta(path).get("step")
    if held != step:
        raise DamagedCheckpoint(f"it holds step {held}")


def load_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors whose key starts with `prefix` ("model.", "optim." or all), without that prefix, on the CPU."""
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (not a mapping)
        return {key.removeprefix(prefix): file.get_tensor(key) for key in keys}


def newest_whole(folder: Path, say: Callable[[str], None], *, set_aside: bool = False) -> tuple[int, Path] | None:
    """The newest checkpoint that is whole, or None if there is none.

    Args:
        folder: the run's checkpoint folder.
        say: gets one line for each newer file that is damaged, naming it and the file taken instead.
        set_aside: rename damaged files to `<name>.damaged`, so that they do not count among the kept ones.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    damaged: list[tuple[Path, Exception]] = []
    for step, path in reversed(list_checkpoints(folder)):
        try:
            verify(path)
            _check_name(path, step)
        except (DamagedCheckpoint, OSError) as error:
            damaged.append((path, error))
            continue
        for bad, why in damaged:
            say(f"checkpoint {bad.name} is damaged ({why}); taking {path.name} instead")
            # A file that only could not be read today is left where it is.
            if set_aside and isinstance(why, DamagedCheckpoint):
                bad.replace(bad.with_name(bad.name + ".damaged"))
        return step, path
    if damaged:
        # Starting again from nothing must be somebody's decision.
        bad, why = damaged[0]
        raise UserError(
            f"none of the {len(damaged)} checkpoints in {folder} is whole ({bad.name}: {why}).\n"
            "Put back a good copy, or move them away to start again from step 0."
        )
    return None


def check_same_shapes(path: Path, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compares names and shapes of a checkpoint's tensors with the run's.

    Raises:
        UserError: they differ; names the first difference and counts the others.
    """
    differences = []
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in wanted:
            differences.append(f"{name} {list(saved[name].shape)} is not in this configuration's model")
        elif name not in saved:
            differences.append(f"{name} {list(wanted[name].shape)} is not in the checkpoint")
        elif saved[name].shape != wanted[name].shape:
            have, want = list(saved[name].shape), list(wanted[name].shape)
            differences.append(f"{name} is {have}, this configuration's is {want}")
    if differences:
        more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
        remedy = "Restore the model and optim sections it was trained with, or choose another run.dir."
        if only_input_size_differs(saved, wanted):
            remedy += (
                f" There, train.init_from={path.parent.parent} with train.interpolate_position_embeddings=true "
                "goes on at another input size."
            )
        raise UserError(f"{path} is a checkpoint of another model or optimizer: {differences[0]}{more}.\n{remedy}")


# -- saving without stopping -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """Outcome of one background write."""

    step: int
    seconds: float
    """From the request until the file was durable."""
    error: Exception | None


class Saver:
    """Writes checkpoints in a background thread, one at a time, and then removes old ones.

    `start` only enqueues copies to host memory (on CUDA they run on the current stream, into pinned memory,
    before whatever training enqueues next); the thread waits for them.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.step = -1
        """Step of the last checkpoint that was begun."""
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._result: Saved | None = None

    @property
    def size(self) -> int:
        """Bytes of the last checkpoint that was begun, but for its header."""
        return sum(t.numel() * t.element_size() for t in self._host.values())

    @property
    def busy(self) -> bool:
        """Whether a write is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Takes a copy of `tensors` and begins to write it; waits first for a write still under way."""
        if self._thread is not None:
            self._thread.join()
        self.step, began = step, time.perf_counter()
        event = self._copy(tensors)
        arguments = (step, began, dict(meta), event)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def poll(self) -> Saved | None:
        """The outcome of a write that has ended since the last call, once."""
        if self.busy:
            return None
        result, self._result = self._result, None
        return result

    def wait(self) -> Saved | None:
        """As `poll`, after waiting for a write under way."""
        if self._thread is not None:
            self._thread.join()
        return self.poll()

    def close(self) -> None:
        """Waits for a write under way: what it writes is good, whatever ends the run."""
        if self._thread is not None:
            self._thread.join()

    def _copy(self, tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
        on_cuda = any(t.is_cuda for t in tensors.values())
        if self._host.keys() != tensors.keys():
            self._host = {
                name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for name, t in tensors.items()
            }
        for name, tensor in tensors.items():
            self._host[name].copy_(tensor.detach(), non_blocking=True)
        if not on_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _write(self, step: int, began: float, meta: dict[str, Any], event: torch.cuda.Event | None) -> None:
        error: Exception | None = None
        try:
            if event is not None:
                event.synchronize()
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                write_checkpoint(checkpoint_path(self.folder, step), self._host, meta)
            except OSError as full:
                # What would go after this save may go before it, as long as a whole one is left.
                if full.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._surplus(step):
                    raise
                verify([path for s, path in list_checkpoints(self.folder) if s < step][-1])
                self._prune(step)
                write_checkpoint(checkpoint_path(self.folder, step), self._host, meta)
            self._prune(step)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the loop must hear of it: this thread ends here
            error = raised
        self._result = Saved(step, time.perf_counter() - began, error)

    def _surplus(self, step: int) -> list[Path]:
        """Checkpoints that are not kept once that of `step` is there."""
        older = [path for s, path in list_checkpoints(self.folder) if s < step]
        return older[: max(0, len(older) - (self.keep - 1))]

    def _prune(self, step: int) -> None:
        for path in self._surplus(step):
            path.unlink(missing_ok=True)
