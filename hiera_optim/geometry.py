"""Shapes of a Hiera model and the window-major Z-order layout of its tokens.

Shape letters used in this package: B batch, M mask units of a sample, L kept mask units, T tokens of a mask
unit at the current stage (T0 at the first), S tokens of a mask unit after the last q-pooling, C channels,
D decoder channels, F elements of a prediction patch.

Z-order: the tokens of a mask unit are stored with the *first* pooling level fastest, index =
(..., s3, s2, s1), and row-major over the spatial dimensions inside a level. Then a mask unit is a row,
q-pooling is a maximum over the innermost group, and a fusion head is one Linear over (group, C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FairModel = Any
"""A Hiera or MaskedAutoencoderHiera of any module name: recognised by structure, no class to name."""


def grid_to_units(x: Tensor, dim: int, units: Sequence[int], q_stride: Sequence[int], levels: int) -> Tensor:
    """Cut a grid of tokens into mask units in Z-order.

    x is [..., units[0]*q_stride[0]**levels, units[1]*q_stride[1]**levels, ..., *rest] with the spatial
    dimensions starting at `dim`; the result is [..., prod(units), prod(q_stride)**levels, *rest].
    """
    dims = len(q_stride)
    lead, rest = list(x.shape[:dim]), list(x.shape[dim + dims :])
    split: list[int] = []
    for count, stride in zip(units, q_stride, strict=True):
        split += [count, *[stride] * levels]
    width = levels + 1
    order = list(range(dim))
    order += [dim + d * width for d in range(dims)]
    order += [dim + d * width + level for level in range(1, width) for d in range(dims)]
    order += [dim + dims * width + i for i in range(len(rest))]
    x = x.reshape(lead + split + rest).permute(order)
    return x.reshape(lead + [math.prod(units), math.prod(q_stride) ** levels] + rest)


def units_to_grid(x: Tensor, dim: int, units: Sequence[int], q_stride: Sequence[int], levels: int) -> Tensor:
    """Inverse of `grid_to_units`: [..., M, T, *rest] with M at `dim` to the spatial grid, row-major."""
    dims = len(q_stride)
    lead, rest = list(x.shape[:dim]), list(x.shape[dim + 2 :])
    order = list(range(dim))
    for d in range(dims):
        order += [dim + d] + [dim + dims * (1 + level) + d for level in range(levels)]
    order += [dim + dims * (levels + 1) + i for i in range(len(rest))]
    x = x.reshape(lead + list(units) + list(q_stride) * levels + rest).permute(order)
    return x.reshape(lead + [m * s**levels for m, s in zip(units, q_stride, strict=True)] + rest)


def unit_to_grid(x: Tensor, dim: int, q_stride: Sequence[int], levels: int) -> Tensor:
    """[..., T, *rest] with T in Z-order at `dim` to [..., *unit_shape, *rest], row-major inside the unit."""
    return units_to_grid(x.unsqueeze(dim), dim, [1] * len(q_stride), q_stride, levels)


def grid_to_unit(x: Tensor, dim: int, q_stride: Sequence[int], levels: int) -> Tensor:
    """Inverse of `unit_to_grid`: [..., *unit_shape, *rest] to [..., T, *rest] in Z-order."""
    return grid_to_units(x, dim, [1] * len(q_stride), q_stride, levels).squeeze(dim)


def zorder_index(unit_shape: Sequence[int], levels: int, q_stride: Sequence[int]) -> Tensor:
    """int64 [prod(unit_shape)]: for each Z-order position, the row-major index inside the unit.

    Raises ValueError unless unit_shape is q_stride**levels.
    """
    if tuple(unit_shape) != tuple(s**levels for s in q_stride):
        raise ValueError(f"unit_shape {tuple(unit_shape)} is not q_stride {tuple(q_stride)} ** {levels}")
    return grid_to_unit(torch.arange(math.prod(unit_shape)).view(*unit_shape), 0, q_stride, levels)


def nearest_valid(size: int, multiple: int) -> str:
    """The multiples of `multiple` around `size`, for error messages: "224 or 256"."""
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def _int_tuple(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


@dataclass(frozen=True)
class Geometry:
    """All sizes of one Hiera model; immutable and hashable, so it can be a constant of a compiled graph."""

    spatial_dims: int
    input_size: tuple[int, ...]
    in_chans: int
    patch_kernel: tuple[int, ...]
    patch_stride: tuple[int, ...]
    patch_padding: tuple[int, ...]
    tokens_shape: tuple[int, ...]
    mask_unit_size: tuple[int, ...]
    mask_units_shape: tuple[int, ...]
    num_mask_units: int
    tokens_per_mask_unit: int
    q_stride: tuple[int, ...]
    flat_q: int
    q_pool: int
    stages: tuple[int, ...]
    stage_ends: tuple[int, ...]
    final_unit_shape: tuple[int, ...]
    tokens_per_unit_final: int
    pred_stride: int
    is_mae: bool

    @property
    def levels(self) -> int:
        """Pooling levels of the Z-order: one less than the number of stages, pooled or not."""
        return len(self.stages) - 1

    @property
    def final_levels(self) -> int:
        """Levels left after the last q-pooling."""
        return self.levels - self.q_pool

    @property
    def zorder(self) -> bool:
        """True if a mask unit is exactly q_stride**levels tokens, which the window-major layout needs."""
        return self.mask_unit_size == tuple(s**self.levels for s in self.q_stride)

    @property
    def unit_pixels(self) -> tuple[int, ...]:
        """Extent of a mask unit in input samples."""
        return tuple(u * s for u, s in zip(self.mask_unit_size, self.patch_stride, strict=True))

    @property
    def frame_stride(self) -> int:
        """3-D: frames a prediction token spans; its label is its first frame (FAIR: time-strided loss)."""
        return int(self.patch_stride[0] * self.q_stride[0] ** self.q_pool)

    @property
    def pred_features(self) -> int:
        """F: elements of a prediction patch, pred_stride ** min(2, spatial_dims) * in_chans."""
        return int(self.pred_stride ** min(2, self.spatial_dims)) * self.in_chans

    @property
    def pred_shape(self) -> tuple[int, ...]:
        """Grid of prediction tokens, row-major."""
        return tuple(m * u for m, u in zip(self.mask_units_shape, self.final_unit_shape, strict=True))

    def stage_levels(self, stage: int) -> int:
        """Levels of Z-order left at the end of a stage (0-based)."""
        return self.levels - min(stage, self.q_pool)

    def num_kept(self, mask_ratio: float) -> int:
        """L, mask units kept at this ratio, computed as FAIR does: int(M * (1 - mask_ratio)).

        Raises ValueError unless 0 <= mask_ratio < 1 keeps at least one mask unit.
        """
        if not 0.0 <= mask_ratio < 1.0:
            raise ValueError(f"mask_ratio must be at least 0 and below 1, not {mask_ratio}")
        kept = int(self.num_mask_units * (1 - mask_ratio))
        if kept < 1:
            raise ValueError(f"mask_ratio {mask_ratio} keeps none of {self.num_mask_units} mask units")
        return kept

    def num_kept_for_loss(self, mask_ratio: float) -> int:
        """`num_kept`, which must also leave a mask unit to predict. Raises ValueError."""
        kept = self.num_kept(mask_ratio)
        if kept >= self.num_mask_units:
            raise ValueError(
                f"mask_ratio {mask_ratio} masks none of {self.num_mask_units} mask units: nothing to predict"
            )
        return kept

    @classmethod
    def from_model(cls, model: FairModel) -> Geometry:
        """Read the sizes of a FAIR model and check that they can work.

        Raises ValueError, one line that names the valid sizes, for an input size that does not divide, a mask
        unit that is not q_stride ** (stages - 1) (MAE), prediction patches that are not square (MAE), and a
        constructor argument that FAIR dropped.
        """
        stage_ends = _int_tuple(model.stage_ends)
        stages = tuple(b - a for a, b in zip((-1, *stage_ends[:-1]), stage_ends, strict=True))
        q_stride, unit = _int_tuple(model.q_stride), _int_tuple(model.mask_unit_size)
        conv = model.patch_embed.proj
        stride, tokens = _int_tuple(conv.stride), _int_tuple(model.tokens_spatial_shape)
        q_pool = int(model.q_pool)
        is_mae = hasattr(model, "decoder_blocks")
        levels = len(stages) - 1
        input_size = _input_size(model, tokens, stride)
        if is_mae and unit != tuple(s**levels for s in q_stride):
            need = tuple(s**levels for s in q_stride)
            raise ValueError(
                f"mask_unit_size {unit} cannot be trained as an MAE: {len(stages)} stages with q_stride "
                f"{q_stride} need mask_unit_size {need}"
            )
        _check_divides(input_size, stride, q_stride, unit, levels)
        patch = tuple(p * s**q_pool for p, s in zip(stride, q_stride, strict=True))
        if is_mae and len(patch) > 1 and patch[-1] != patch[-2]:
            raise ValueError(
                f"prediction patches must be square, but patch_stride {stride} and q_stride {q_stride} "
                f"pooled {q_pool} times give {patch[-2]} x {patch[-1]}: use equal strides in the last two "
                "dimensions"
            )
        kernel, padding = _int_tuple(conv.kernel_size), _int_tuple(conv.padding)
        for i, n, k, s, p in zip(input_size, tokens, kernel, stride, padding, strict=True):
            if (i + 2 * p - k) // s + 1 != n:
                raise ValueError(
                    f"patch_kernel {kernel} with patch_stride {stride} and patch_padding {padding} does not "
                    f"give {tokens} tokens for input_size {input_size}: patch_kernel - 2 * patch_padding "
                    "must be 1 to patch_stride"
                )
        units = _int_tuple(model.mask_spatial_shape)
        final_unit = tuple(u // s**q_pool for u, s in zip(unit, q_stride, strict=True))
        return cls(
            spatial_dims=len(q_stride),
            input_size=input_size,
            in_chans=int(conv.weight.shape[1]),
            patch_kernel=kernel,
            patch_stride=stride,
            patch_padding=padding,
            tokens_shape=tokens,
            mask_unit_size=unit,
            mask_units_shape=units,
            num_mask_units=math.prod(units),
            tokens_per_mask_unit=math.prod(unit),
            q_stride=q_stride,
            flat_q=math.prod(q_stride),
            q_pool=q_pool,
            stages=stages,
            stage_ends=stage_ends,
            final_unit_shape=final_unit,
            tokens_per_unit_final=math.prod(final_unit),
            pred_stride=int(getattr(model, "pred_stride", patch[-1])),
            is_mae=is_mae,
        )


def _input_size(model: FairModel, tokens: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The input size a model was built for: from the config FAIR keeps, else from the tokens."""
    config = getattr(model, "config", None)
    said = config.get("input_size") if isinstance(config, dict) else None
    built = tuple(n * s for n, s in zip(tokens, stride, strict=True))
    if said is None:
        return built
    said = _int_tuple(said)
    # FAIR's constructor wrapper records positional arguments but does not pass them on.
    if tuple(i // s for i, s in zip(said, stride, strict=False)) != tokens:
        raise ValueError(
            f"the model's config says input_size {said}, but it was built for {built}: FAIR drops positional "
            f"arguments; pass input_size={said} by name"
        )
    return said


def _check_divides(
    input_size: tuple[int, ...],
    stride: tuple[int, ...],
    q_stride: tuple[int, ...],
    unit: tuple[int, ...],
    levels: int,
) -> None:
    """Raise ValueError unless every side is a whole number of mask units."""
    multiples = [p * math.lcm(s**levels, u) for p, s, u in zip(stride, q_stride, unit, strict=True)]
    for axis, (size, multiple) in enumerate(zip(input_size, multiples, strict=True)):
        if size % multiple:
            raise ValueError(
                f"input_size {input_size} is impossible: dimension {axis} is {size} but must be a multiple "
                f"of {multiple} (patch_stride x q_stride ** (stages - 1)); nearest valid: "
                f"{nearest_valid(size, multiple)}"
            )
