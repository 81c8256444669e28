"""Every kernel launch of a training step on a GPU that is not there, and what its assembler makes of them.

The step runs on fake CUDA tensors: launchers choose their tiles as on the real chip, and the launches are written
down instead of made. Triton needs no GPU to compile for one.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hiera_optim import fast, tables
from hiera_optim.geometry import Geometry
from hiera_optim.ops import _launch, attention, batched_sums, library
from hiera_optim.ops.sample_masks import sample_masks
from hiera_optim.optim import AdamW, FlatOptimizer, Muon, flat, muon_parameters

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Chip:
    """A GPU as launchers see it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True)
class Launch:
    """What decides a compiled kernel."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rsplit('.', 1)[-1]}.{self.kernel.__name__} {dict(self.constants)}"


@dataclass(frozen=True)
class Usage:
    """What a program of a compiled kernel takes."""

    shared_bytes: int
    tensor_memory: int
    """Columns, of the 512 that a Blackwell multiprocessor has."""
    registers: int
    stack_bytes: int
    """Of a thread: spilled registers."""


def _describe(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    names = [parameter.name for parameter in kernel.params]
    given = dict(zip(names, arguments, strict=False)) | {k: v for k, v in keywords.items() if k in names}
    signature, constants, aligned = {}, {}, []
    for i, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}]>"
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(i)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(i)
    options = {k: keywords[k] for k in OPTIONS if keywords.get(k) is not None}
    return Launch(kernel, *(tuple(d.items()) for d in (signature, constants)), tuple(aligned), tuple(options.items()))


@contextmanager
def _recording(chip: Chip) -> Iterator[dict[Launch, None]]:
    """Launches inside are collected, once each, as on `chip`."""
    seen: dict[Launch, None] = {}

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        seen[_describe(self, arguments, keywords)] = None

    def at_once(make: Callable[[], Any], device: torch.device) -> Any:
        return make()

    def fake(make: Callable[..., Any], code: tuple[int, ...], device: torch.device) -> Any:
        with unset_fake_temporarily(), torch.device("cpu"):
            made = make(code, torch.device("cpu"))
        tensors = {name: value for name, value in vars(made).items() if isinstance(value, Tensor)}
        return replace(
            made, **{name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()}
        )

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(JITFunction, "run", run)
        patch.setattr(_launch, "_cuda_properties", lambda index: (chip.multiprocessors, chip.capability))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(attention, "_device", lambda: torch.device("cuda", 0))
        patch.setattr(batched_sums, "_batches", {})
        patch.setattr(flat, "_check_parameters", lambda named: None)  # fake tensors have no addresses
        for module in (tables, batched_sums):
            patch.setattr(module, "outside_graph_pools", at_once)
        for name in ("_patch_tables", "_label_tables"):
            patch.setattr(tables, name, partial(fake, getattr(tables, name)))
        try:
            yield seen
        finally:
            for cached in (tables.patch_tables, tables.label_tables, tables.keep_probabilities):
                cached.cache_clear()


@contextmanager
def _forward_and_backward_at_once() -> Iterator[None]:
    """The operators run their own code, not their fake one, and each forward its backward after it."""

    def chain(
        x: Tensor, parameters: list[Tensor], specs: list[int], batch: int, eps: float, *rest: Any
    ) -> list[Tensor]:
        out = raw["chain"](x, parameters, specs, batch, eps, *rest)
        for _ in range(2):  # sums are batched from the second time on
            raw["chain_backward"](torch.empty_like(out[0]), x, parameters, out[1:], specs, batch, eps, *rest[:3])
        return out

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = raw["linear"](x, weight, bias)
        raw["_linear_backward"](torch.empty_like(out), x, weight, bias.dtype)
        return out

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        out = raw["_norm"](x, weight, bias, eps, dtype)
        raw["_norm_backward"](torch.empty_like(out[0]), x, out[1], out[2], weight)
        return out

    def add_position(x: Tensor, pos: Tensor, keep_idx: Tensor, slot: Tensor) -> Tensor:
        out: Tensor = raw["add_position"](x, pos, keep_idx, slot)
        raw["_add_position_backward"](torch.empty_like(out), slot, pos.dtype)
        return out

    def assemble(latent: Tensor, token: Tensor, pos: Tensor, slot: Tensor) -> Tensor:
        out: Tensor = raw["assemble"](latent, token, pos, slot)
        raw["_assemble_backward"](torch.empty_like(out), slot, latent.shape[1], token.numel(), token.dtype)
        return out

    def loss(pred: Tensor, x: Tensor, drop_idx: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        out = raw["_mae_loss"](pred, x, drop_idx, geometry)
        raw["_mae_loss_backward"](torch.empty_like(out[0]), pred, x, drop_idx, out[1], out[2], geometry)
        return out

    operators = {k: v for k, v in vars(library).items() if isinstance(v, CustomOpDef)}
    raw = {name: inspect.unwrap(operator._init_fn) for name, operator in operators.items()}
    ours = {
        "chain": chain, "linear": linear, "_norm": norm, "add_position": add_position, "assemble": assemble,
        "_mae_loss": loss,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in operators:
            patch.setattr(library, name, ours.get(name, raw[name]))
        yield


def _onto_the_gpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Fake parameters in place of the real ones."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))


def training_step(model: nn.Module, chip: Chip, batch: int, dtype: torch.dtype) -> list[Launch]:
    """The launches of a step of AdamW and of one of Muon, fp32 masters, mask ratio 0.6.

    model: FAIR's, on the CPU; its parameters are lost.
    """
    g = Geometry.from_model(model)
    with _recording(chip) as seen, torch.device("cuda"):
        _onto_the_gpu(model, dtype)
        x = torch.empty(batch, g.in_chans, *g.input_size, dtype=dtype)
        ids = torch.arange(batch)
        mask, keep, drop, slot, drop_slot = sample_masks(ids, g.num_mask_units, g.num_kept_for_loss(0.6), 0)
        scales = torch.ones(2 * len(model.blocks), batch)  # type: ignore[arg-type]
        with torch.no_grad(), _forward_and_backward_at_once():
            fast.mae_loss(model, g, x, mask, keep, drop, scales, (slot, drop_slot))
        named = list(model.named_parameters())
        make: list[Callable[[], FlatOptimizer]] = [
            lambda: AdamW(named, lr=1e-3, master=True, fp32_accumulation=True),
            lambda: Muon(named, lr=1e-3, muon=muon_parameters(model), master=True, fp32_accumulation=True),
        ]
        for optimizer in (one() for one in make):
            optimizer.accumulate()
            optimizer.grad_norm()
            optimizer.step(torch.ones(()), zero_grad=True)
    return list(seen)


def assemble(launch: Launch, chip: Chip) -> Usage:
    """Compiles a launch for a chip."""
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        dict(launch.constants),
        {(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    major, minor = chip.capability
    compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=dict(launch.options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    return Usage(compiled.metadata.shared, tensor_memory, int(found[1]), int(found[2]))
