"""Masks of mask units: True keeps a mask unit, False removes it, as in FAIR's Hiera.

A mask is bool [B, M]; keep_idx is int64 [B, L] and drop_idx int64 [B, M - L], both ascending in each row.
All shapes are static and nothing here reads a device value on the host, except `check_mask` and
`check_keep_idx`, which are for use outside compiled and captured regions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hiera_optim.geometry import FairModel, Geometry

_LOW32 = 0xFFFFFFFF


def mask_from_keep(keep_idx: Tensor, num_mask_units: int) -> Tensor:
    """bool [B, M] that is True at the positions of keep_idx, int64 [B, L]."""
    mask = torch.zeros(keep_idx.shape[0], num_mask_units, dtype=torch.bool, device=keep_idx.device)
    return mask.scatter(1, keep_idx, True)


def split_mask(mask: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """(keep_idx [B, L], drop_idx [B, M - L]), ascending, of a mask [B, M] whose rows keep L = num_kept."""
    order = mask.to(torch.uint8).argsort(dim=1, stable=True)
    dropped = mask.shape[1] - num_kept
    return order[:, dropped:], order[:, :dropped]


def _split_order(order: Tensor, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, keep_idx, drop_idx) of a random order of mask units whose first L are kept."""
    mask = mask_from_keep(order[:, :num_kept], order.shape[1])
    return (mask, *split_mask(mask, num_kept))


def random_mask(
    batch: int,
    num_mask_units: int,
    num_kept: int,
    device: torch.device | str | int | None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, keep_idx, drop_idx) from one draw torch.rand(B, M), the draw that FAIR's get_random_mask makes.

    The same state of the generator gives the same mask as FAIR.
    """
    noise = torch.rand(batch, num_mask_units, device=device, generator=generator)
    return _split_order(noise.argsort(dim=1), num_kept)


def _mix32(h: Tensor) -> Tensor:
    """A bijective 32-bit hash (C. Wellons' lowbias32) on int64 values below 2**32.

    The second multiplier is 0x846ca68b - 2**32, so that no product leaves the signed 64-bit range.
    """
    h = (h ^ (h >> 16)) * 0x7FEB352D & _LOW32
    h = (h ^ (h >> 15)) * (0x846CA68B - (1 << 32)) & _LOW32
    return h ^ (h >> 16)


def _mix32_int(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x7FEB352D & _LOW32
    h = (h ^ (h >> 15)) * 0x846CA68B & _LOW32
    return h ^ (h >> 16)


def hash_salt(seed: int) -> int:
    """A seed of any size as the 32 bits that a sample's hash starts from."""
    salt = 0x9E3779B9
    rest = seed & ((1 << 64) - 1)
    for part in (rest & _LOW32, rest >> 32):
        salt = _mix32_int(salt ^ part)
    return salt


def _sample_hash(sample_ids: Tensor, count: int, seed: int) -> Tensor:
    """int64 [B, count] below 2**32: a hash of (seed, sample id, position), the same on every device."""
    if sample_ids.dtype != torch.int64 or sample_ids.dim() != 1:
        raise ValueError(f"sample_ids must be int64 [B], not {sample_ids.dtype} {tuple(sample_ids.shape)}")
    salt = hash_salt(seed)
    h = _mix32((sample_ids & _LOW32) ^ salt)
    h = _mix32((h + ((sample_ids >> 32) & _LOW32) * 0x3C6EF372) & _LOW32)
    unit = torch.arange(count, device=sample_ids.device)
    # A second pass of the unit's own hash separates samples whose 32-bit states are near each other.
    return _mix32(h[:, None] ^ _mix32(unit + salt & _LOW32)[None, :])


def sample_noise(sample_ids: Tensor, count: int, seed: int) -> Tensor:
    """fp32 [B, count] uniform in [0, 1), a pure function of (seed, sample id): stochastic depth's draws.

    Another stream than `sample_mask`'s, without RNG state, so that it can be captured in a CUDA graph.
    """
    return (_sample_hash(sample_ids, count, seed ^ 0x5DEECE66D) >> 8).float() * 2.0**-24


def sample_mask(sample_ids: Tensor, num_mask_units: int, num_kept: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks that are a pure function of (seed, sample id), the same on every device and rank.

    sample_ids: int64 [B]; seed: any int. Returns mask bool [B, M], keep_idx int64 [B, L], drop_idx int64
    [B, M - L], ascending. No RNG state is read or changed, so it can be captured in a CUDA graph.
    Raises ValueError unless 1 <= num_kept <= num_mask_units and sample_ids is int64 [B].
    """
    if not 1 <= num_kept <= num_mask_units:
        raise ValueError(f"num_kept must be 1 to {num_mask_units}, not {num_kept}")
    noise = _sample_hash(sample_ids, num_mask_units, seed)
    unit = torch.arange(num_mask_units, device=sample_ids.device)
    # Equal hashes are ordered by the unit, so the order is unique and the sort need not be stable.
    key = noise * num_mask_units + unit
    return _split_order(key.argsort(dim=1), num_kept)


def on_host_path() -> bool:
    """True where values may be read on the host: neither compiling nor capturing a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def check_mask_form(mask: Tensor, batch: int, num_mask_units: int) -> None:
    """Raise TypeError or ValueError unless mask is bool [batch, num_mask_units]. Reads no values."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = keep), not {found}")
    if tuple(mask.shape) != (batch, num_mask_units):
        raise ValueError(f"mask must be [{batch}, {num_mask_units}] (batch, mask units), not {list(mask.shape)}")


def check_mask(mask: Tensor, batch: int, num_mask_units: int) -> int:
    """Check a mask on the host and return L, the number of mask units that every row keeps.

    Reads the mask's values (on CUDA: a synchronisation). Raises TypeError for a dtype other than bool and
    ValueError for another shape, rows that keep different numbers, or rows that keep none.
    """
    check_mask_form(mask, batch, num_mask_units)
    counts = mask.sum(dim=1).tolist()
    if len(set(counts)) > 1:
        low, high = min(counts), max(counts)
        raise ValueError(
            f"mask rows must keep the same number of mask units: row {counts.index(low)} keeps {low}, "
            f"row {counts.index(high)} keeps {high}"
        )
    if not counts or counts[0] < 1:
        raise ValueError("mask keeps no mask unit: every row must keep at least one")
    return int(counts[0])


def check_keep_idx_form(keep_idx: Tensor, batch: int, num_mask_units: int) -> None:
    """Raise TypeError or ValueError unless keep_idx is int64 [batch, 1..num_mask_units]. Reads no values."""
    if not isinstance(keep_idx, Tensor) or keep_idx.dtype != torch.int64:
        found = keep_idx.dtype if isinstance(keep_idx, Tensor) else type(keep_idx).__name__
        raise TypeError(f"keep_idx must be an int64 tensor, not {found}")
    if keep_idx.dim() != 2 or keep_idx.shape[0] != batch or not 1 <= keep_idx.shape[1] <= num_mask_units:
        raise ValueError(f"keep_idx must be [{batch}, 1..{num_mask_units}], not {list(keep_idx.shape)}")


def check_keep_idx(keep_idx: Tensor, mask: Tensor | None, num_mask_units: int) -> None:
    """Check on the host that keep_idx is ascending, in range, and names what mask (if given) keeps."""
    bounds_ok = bool(((keep_idx >= 0) & (keep_idx < num_mask_units)).all())
    if not bounds_ok or not bool((keep_idx.diff(dim=1) > 0).all()):
        raise ValueError(f"keep_idx rows must be ascending mask units from 0 to {num_mask_units - 1}")
    if mask is not None and not torch.equal(mask, mask_from_keep(keep_idx, num_mask_units)):
        raise ValueError("keep_idx does not name the mask units that mask keeps")


def unwrap(model: nn.Module) -> FairModel:
    """The model inside torch.compile (`_orig_mod`) and DDP (`module`) wrappers, in any nesting."""
    inner: FairModel = model
    while True:
        modules = inner.__dict__.get("_modules", {})
        nested = modules.get("_orig_mod") or (None if "blocks" in modules else modules.get("module"))
        if nested is None:
            return inner
        inner = nested


def make_mae_mask(
    model: nn.Module,
    batch_size: int,
    mask_ratio: float,
    device: torch.device | str | int | None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random masks for one MAE step: mask bool [B, M] (True = keep) and keep_idx int64 [B, L], ascending.

    Draws what FAIR's get_random_mask draws, so the same RNG state gives the same mask. The model may be
    wrapped by torch.compile or DDP. Raises ValueError for a mask ratio that keeps or masks nothing.
    """
    geom = Geometry.from_model(unwrap(model))
    kept = geom.num_kept_for_loss(mask_ratio)
    mask, keep_idx, _ = random_mask(batch_size, geom.num_mask_units, kept, device, generator)
    return mask, keep_idx.contiguous()


class MAEStepInputs:
    """Buffers at fixed addresses for a compiled or captured MAE step.

    Attributes: x [batch_size, in_chans, *input_size] of `dtype`; mask bool [B, M]; keep_idx int64 [B, L];
    mask_ratio. Copy a batch into `x`, call `refresh_mask()`, then
    `model(inputs.x, mask_ratio=inputs.mask_ratio, mask=inputs.mask, keep_idx=inputs.keep_idx)`.
    Raises ValueError if in_chans or input_size are not the model's, or for an impossible mask ratio.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        in_chans: int,
        input_size: Sequence[int],
        mask_ratio: float,
        device: torch.device | str | int,
        dtype: torch.dtype = torch.bfloat16,
        generator: torch.Generator | None = None,
    ) -> None:
        geom = Geometry.from_model(unwrap(model))
        size = tuple(int(n) for n in input_size)
        if (in_chans, *size) != (geom.in_chans, *geom.input_size):
            raise ValueError(f"the model takes {geom.in_chans} channels of {geom.input_size}, not {in_chans} of {size}")
        self.batch_size = batch_size
        self.mask_ratio = mask_ratio
        self.device = device
        self.dtype = dtype
        self.generator = generator
        self._units = geom.num_mask_units
        self._kept = geom.num_kept_for_loss(mask_ratio)
        # Zeros rather than empty: a warm-up step on the fresh buffer then has a finite loss.
        self.x = torch.zeros(batch_size, in_chans, *size, device=device, dtype=dtype)
        mask, keep_idx, _ = random_mask(batch_size, self._units, self._kept, device, generator)
        self.mask = mask
        self.keep_idx = keep_idx.contiguous()

    def refresh_mask(self) -> None:
        """Draw new masks into `mask` and `keep_idx`, in place."""
        mask, keep_idx, _ = random_mask(self.batch_size, self._units, self._kept, self.device, self.generator)
        self.mask.copy_(mask)
        self.keep_idx.copy_(keep_idx)
