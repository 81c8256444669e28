"""Muon for hidden matrices, AdamW for everything else, on one set of flat buffers.

Muon: Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The scale that lets it share
AdamW's learning rate and weight decay: Liu et al. 2025 (arXiv 2502.16982). Arithmetic as torch.optim.Muon,
but batched by shape and shared over ranks: each rank orthogonalises its part (newton_schulz.py) and all
gather the results. Gradients must already be equal on all ranks. Momentum is kept whole on every rank, so
that checkpoints do not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hiera_optim.optim.adamw import AdamWSettings, adamw_update, check_adam, check_no_decay
from hiera_optim.optim.flat import Entry, FlatOptimizer, FlatParameters
from hiera_optim.optim.newton_schulz import STEPS, Matrix, Placement, make_plan, newton_schulz

AdjustLr = Literal["original", "match_rms_adamw"]

_QKV_SUFFIX = "attn.qkv.weight"
# Input and output layers, which Muon's authors leave to AdamW.
_NOT_HIDDEN = ("patch_embed.", "decoder_pred.", "head.")


def muon_parameters(model: nn.Module) -> set[str]:
    """Names of a Hiera model's hidden matrices: what Muon takes.

    Weights of Linear and convolution layers of the blocks, the decoder's blocks and embedding, and the
    fusion heads (a convolution whose kernel equals its stride is a matrix [out, in * kernel]). Not the patch
    embedding, the prediction and classification heads, position embeddings, the mask token, norms and biases.
    """
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, layers)}
    own = {name for name, _ in model.named_parameters()}
    return {name for name in names & own if not name.startswith(_NOT_HIDDEN)}


def learning_rate_factor(rows: int, cols: int, adjust_lr: AdjustLr) -> float:
    """What multiplies the learning rate of a matrix [rows, cols] = [out, in].

    "original": sqrt(max(1, rows / cols)) (Jordan). "match_rms_adamw": 0.2 sqrt(max(rows, cols)), which gives
    the update the root mean square of AdamW's (arXiv 2502.16982, section 2.2).
    """
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


class Muon(FlatOptimizer):
    """Muon over `muon` parameters and AdamW over the others; see FlatOptimizer for the interface.

    Args:
        named_parameters: as from `model.named_parameters()`; the optimizer re-points their storage.
        muon: names of the hidden matrices (see muon_parameters); more dimensions are flattened to two.
        lr: first learning rate, of AdamW's part; `optimizer.lr` drives both.
        muon_lr: first learning rate of Muon's part; it stays at the ratio muon_lr / lr. None: the same as lr,
            which is what adjust_lr="match_rms_adamw" is made for. Jordan's 0.02 goes with "original".
        adjust_lr: see learning_rate_factor.
        momentum, nesterov: of Muon; the momentum is an exponential average, as in torch.optim.Muon.
        split_qkv: treat a packed qkv weight as three matrices, since q, k and v are three maps.
        betas, eps: of AdamW.
        weight_decay: of both, decoupled; `no_decay` names exceptions among AdamW's parameters.
        ns_dtype: dtype of the Newton–Schulz iteration; None: bfloat16 on CUDA, float32 elsewhere.
        process_group: ranks that share the work; None: all, or this process alone without torch.distributed.
        master, fp32_accumulation: see FlatOptimizer.

    Raises:
        ValueError: a setting is out of range, or muon or no_decay name unknown or unsuitable parameters.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon: Collection[str],
        lr: float,
        muon_lr: float | None = None,
        adjust_lr: AdjustLr = "match_rms_adamw",
        momentum: float = 0.95,
        nesterov: bool = True,
        split_qkv: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.05,
        no_decay: Collection[str] = (),
        ns_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        master: bool = True,
        fp32_accumulation: bool = False,
    ) -> None:
        check_adam(betas, eps, weight_decay)
        named, matrices, exempt = list(named_parameters), frozenset(muon), frozenset(no_decay)
        check_no_decay(named, exempt)
        _check_muon(named, matrices, exempt, momentum, adjust_lr)
        if muon_lr is not None and not (muon_lr >= 0 and lr > 0):
            raise ValueError(f"muon_lr is kept at a ratio to lr, so lr must be positive; got {muon_lr} and {lr}")

        def group_of(name: str, _: nn.Parameter) -> str:
            return "muon" if name in matrices else "no_decay" if name in exempt else "decay"

        params = FlatParameters(named, ("muon", "decay", "no_decay"), group_of)
        super().__init__(params, lr=lr, master=master, fp32_accumulation=fp32_accumulation)
        self.momentum = self.add_slot("momentum", ("muon",))
        self.exp_avg = self.add_slot("exp_avg", ("decay", "no_decay"))
        self.exp_avg_sq = self.add_slot("exp_avg_sq", ("decay", "no_decay"))
        self._muon_end = params.ranges["muon"][1]
        decay_end = params.ranges["decay"][1] - self._muon_end
        self.settings = AdamWSettings(*betas, eps, weight_decay, decay_end)
        self.beta, self.nesterov = momentum, nesterov
        self.lr_ratio = 1.0 if muon_lr is None else muon_lr / lr

        entries = [entry for entry in params.entries if entry.group == "muon"]
        self.matrices = [matrix for entry in entries for matrix in _matrices(entry, split_qkv)]
        self.factors = [learning_rate_factor(m.rows, m.cols, adjust_lr) * self.lr_ratio for m in self.matrices]
        distributed = dist.is_available() and dist.is_initialized()
        self._group = process_group
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.ranks = dist.get_world_size(process_group) if distributed else 1
        self.plan = make_plan(self.matrices, self.ranks)
        cuda = params.device.type == "cuda"
        self._allocate(ns_dtype or (torch.bfloat16 if cuda else torch.float32))

    def _allocate(self, dtype: torch.dtype) -> None:
        """Persistent work space: one chunk a rank to exchange, one to start from, and the Gram matrices."""
        device, plan = self.params.device, self.plan
        self._exchange = torch.zeros(self.ranks, plan.chunk, dtype=dtype, device=device)
        self._packed = torch.zeros(plan.chunk, dtype=dtype, device=device)
        own = plan.batches[self.rank]
        self._has_padding = sum(b.count * b.rows * b.cols for b in own) > sum(
            m.rows * m.cols for m, p in zip(self.matrices, plan.placements, strict=True) if p.rank == self.rank
        )
        gram = max((batch.count * batch.rows**2 for batch in own), default=0)
        self._workspace = torch.empty(2 * gram, dtype=dtype, device=device)
        self._tables = None
        if device.type == "cuda":
            from hiera_optim.optim.muon_kernel import make_tables

            self._tables = make_tables(self.matrices, plan, self.rank, self.factors, device)

    def _update(self, grad: Tensor, grad_scale: Tensor | None, zero_grad: bool) -> None:
        end = self._muon_end
        weights = self.params.flat[:end]
        master = None if self.master is None else self.master[:end]
        if self._has_padding:
            # a NaN of an earlier step has spread there, and packing writes the matrices alone
            self._packed.zero_()
        if self._tables is not None:
            from hiera_optim.optim.muon_kernel import apply_triton, pack_triton

            tables, settings = self._tables, self.settings
            pack_triton(grad, self.momentum, self._packed, grad_scale, tables, self.beta, self.nesterov, zero_grad)
            self._orthogonalize()
            apply_triton(weights, master, self._exchange, self.lr, tables, self.lr_ratio * settings.weight_decay)
        else:
            own = [p if p.rank == self.rank else None for p in self.plan.placements]
            pack_reference(
                grad,
                self.momentum,
                self._packed,
                grad_scale,
                self.matrices,
                own,
                self.beta,
                self.nesterov,
                zero_grad,
            )
            self._orthogonalize()
            decay = self.lr_ratio * self.settings.weight_decay
            apply_reference(
                weights,
                master,
                self._exchange,
                self.lr,
                self.matrices,
                self.plan.placements,
                self.factors,
                decay,
            )
        adamw_update(
            self.params.flat[end:],
            grad[end:],
            self.exp_avg,
            self.exp_avg_sq,
            None if self.master is None else self.master[end:],
            self.lr,
            self.step_count,
            grad_scale,
            self.settings,
            zero_grad,
        )

    def _orthogonalize(self) -> None:
        mine = self._exchange[self.rank]
        for batch in self.plan.batches[self.rank]:
            newton_schulz(batch.view(self._packed), batch.view(mine), self._workspace, STEPS)
        if self.ranks > 1:
            dist.all_gather_into_tensor(self._exchange.view(-1), mine, group=self._group)


def pack_reference(
    grad: Tensor,
    momentum: Tensor,
    packed: Tensor,
    grad_scale: Tensor | None,
    matrices: list[Matrix],
    placements: list[Placement | None],
    beta: float,
    nesterov: bool,
    zero_grad: bool,
) -> None:
    """Updates the momentum of every matrix and writes the update of those with a placement into `packed`.

    grad is float32 or bfloat16, momentum float32, packed of the iteration's dtype; all flat.
    """
    for matrix, placement in zip(matrices, placements, strict=True):
        part = slice(matrix.offset, matrix.end)
        g, m = grad[part].float(), momentum[part]
        if grad_scale is not None:
            g = g * grad_scale
        m.lerp_(g, 1 - beta)
        if placement is not None:
            update = g.lerp(m, beta) if nesterov else m
            _place(packed, matrix, placement.start, placement.width).copy_(update.view(matrix.rows, matrix.cols))
        if zero_grad:
            grad[part].zero_()


def apply_reference(
    param: Tensor,
    master: Tensor | None,
    exchange: Tensor,
    lr: Tensor,
    matrices: list[Matrix],
    placements: list[Placement],
    factors: list[float],
    weight_decay: float,
) -> None:
    """w <- (1 - lr weight_decay) w - lr factor O for every matrix; O from exchange [ranks, chunk]."""
    flat, chunk = exchange.view(-1), exchange.shape[1]
    decay = 1 - lr * weight_decay
    for matrix, placement, factor in zip(matrices, placements, factors, strict=True):
        part = slice(matrix.offset, matrix.end)
        start = placement.rank * chunk + placement.start
        update = _place(flat, matrix, start, placement.width).float()
        target = param[part] if master is None else master[part]
        w = target.float().view(matrix.rows, matrix.cols) * decay - (lr * factor) * update
        target.copy_(w.view(-1))
        if master is not None:
            param[part].copy_(target)


def _place(buffer: Tensor, matrix: Matrix, start: int, width: int) -> Tensor:
    """The matrix's place in a packed buffer as a view [rows, cols], transposed for tall ones."""
    strides = (1, width) if matrix.transposed else (width, 1)
    return buffer.as_strided((matrix.rows, matrix.cols), strides, buffer.storage_offset() + start)


def _matrices(entry: Entry, split_qkv: bool) -> list[Matrix]:
    rows = entry.shape[0]
    cols = entry.parameter.numel() // rows
    parts = 3 if split_qkv and entry.name.endswith(_QKV_SUFFIX) and rows % 3 == 0 else 1
    rows //= parts
    return [Matrix(entry.offset + i * rows * cols, rows, cols) for i in range(parts)]


def _check_muon(
    named: list[tuple[str, nn.Parameter]],
    matrices: frozenset[str],
    exempt: frozenset[str],
    momentum: float,
    adjust_lr: str,
) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    if adjust_lr not in ("original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr must be original or match_rms_adamw, got {adjust_lr}")
    shapes = {name: p.shape for name, p in named}
    for name in sorted(matrices):
        if name not in shapes:
            raise ValueError(f"muon names {name}, which is not a parameter")
        if len(shapes[name]) < 2:
            raise ValueError(f"muon names {name}, which is not a matrix: shape {list(shapes[name])}")
        if name in exempt:
            raise ValueError(f"{name} is in both muon and no_decay; Muon decays all its matrices")
