"""AdamW on flat buffers (Loshchilov and Hutter 2019, arXiv 1711.05101), with torch.optim.AdamW's arithmetic.

On CUDA one Triton kernel updates everything in one pass (adamw_kernel.py); elsewhere, and as that kernel's
oracle, `adamw_reference` does the same in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hiera_optim.optim.flat import FlatOptimizer, FlatParameters

# Elements the reference updates at once, so that its temporaries are small and stay in cache: 4.4 ms against
# 5.0 ms in one piece, for 3.4 M parameters on one core (torch's fused AdamW: 1.4 ms).
_CHUNK = 1 << 17


@dataclass(frozen=True)
class AdamWSettings:
    """What does not change from step to step; elements from `decay_end` on are not decayed."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay_end: int


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    lr: Tensor,
    step: Tensor,
    grad_scale: Tensor | None,
    settings: AdamWSettings,
    zero_grad: bool = False,
) -> None:
    """One AdamW update of flat tensors [N] in place; reads lr, step and grad_scale on the host.

    param and grad are float32 or bfloat16, exp_avg, exp_avg_sq and master float32; step is the number of this
    step, from 1.
    """
    rate, count = lr.item(), step.item()
    scale = 1.0 if grad_scale is None else grad_scale.item()
    beta1, beta2 = settings.beta1, settings.beta2
    correction1, correction2 = 1 - beta1**count, math.sqrt(1 - beta2**count)
    target = param if master is None else master
    # sqrt(v) / correction2 + eps, with correction2 moved out so that it costs no pass.
    eps, step_size = settings.eps * correction2, rate * correction2 / correction1
    spans = ((0, settings.decay_end, settings.weight_decay), (settings.decay_end, param.numel(), 0.0))
    for span_start, span_end, weight_decay in spans:
        for start in range(span_start, span_end, _CHUNK):
            part = slice(start, min(start + _CHUNK, span_end))
            g, m, v = grad[part].float(), exp_avg[part], exp_avg_sq[part]
            p = target[part] if target.dtype == torch.float32 else target[part].float()
            if weight_decay:
                p.mul_(1 - rate * weight_decay)
            m.mul_(beta1).add_(g, alpha=(1 - beta1) * scale)
            v.mul_(beta2).addcmul_(g, g, value=(1 - beta2) * scale * scale)
            p.addcdiv_(m, v.sqrt().add_(eps), value=-step_size)
            if target is not param or p.dtype != param.dtype:
                param[part].copy_(p)
            if zero_grad:
                grad[part].zero_()


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    lr: Tensor,
    step: Tensor,
    grad_scale: Tensor | None,
    settings: AdamWSettings,
    zero_grad: bool = False,
) -> None:
    """`adamw_reference` by the kernel where there is a GPU."""
    if param.is_cuda:
        from hiera_optim.optim.adamw_kernel import adamw_triton

        adamw_triton(param, grad, exp_avg, exp_avg_sq, master, lr, step, grad_scale, settings, zero_grad)
    else:
        adamw_reference(param, grad, exp_avg, exp_avg_sq, master, lr, step, grad_scale, settings, zero_grad)


def no_decay_parameters(model: nn.Module) -> set[str]:
    """Names that MAE recipes do not decay: biases, norms (fewer than two dimensions), the model's own list.

    The rule of facebookresearch/mae (timm's `add_weight_decay`); the list is FAIR's `no_weight_decay()`.
    """
    own = getattr(model, "no_weight_decay", None)
    listed = set(own()) if callable(own) else set()
    return {name for name, p in model.named_parameters() if p.ndim < 2 or name.endswith(".bias") or name in listed}


def check_adam(betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ValueError for settings outside AdamW's domain."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight decay must not be negative, got {weight_decay}")


def check_no_decay(named: list[tuple[str, nn.Parameter]], no_decay: Collection[str]) -> None:
    """Raises ValueError when no_decay names a parameter that does not exist."""
    unknown = sorted(set(no_decay) - {name for name, _ in named})
    if unknown:
        raise ValueError(f"no_decay names {unknown[0]}, which is not a parameter")


class AdamW(FlatOptimizer):
    """AdamW with decoupled weight decay over one flat buffer; see FlatOptimizer for the interface.

    Args:
        named_parameters: as from `model.named_parameters()`; the optimizer re-points their storage.
        lr: first learning rate.
        betas, eps, weight_decay: as torch.optim.AdamW.
        no_decay: names of parameters without weight decay (see no_decay_parameters).
        master, fp32_accumulation: see FlatOptimizer.

    Raises:
        ValueError: a setting is out of range, or no_decay names an unknown parameter.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.05,
        no_decay: Collection[str] = (),
        master: bool = True,
        fp32_accumulation: bool = False,
    ) -> None:
        check_adam(betas, eps, weight_decay)
        named, exempt = list(named_parameters), frozenset(no_decay)
        check_no_decay(named, exempt)
        params = FlatParameters(named, ("decay", "no_decay"), lambda name, _: "no_decay" if name in exempt else "decay")
        super().__init__(params, lr=lr, master=master, fp32_accumulation=fp32_accumulation)
        self.exp_avg = self.add_slot("exp_avg", ("decay", "no_decay"))
        self.exp_avg_sq = self.add_slot("exp_avg_sq", ("decay", "no_decay"))
        self.settings = AdamWSettings(*betas, eps, weight_decay, decay_end=params.ranges["decay"][1])

    def _update(self, grad: Tensor, grad_scale: Tensor | None, zero_grad: bool) -> None:
        adamw_update(
            self.params.flat,
            grad,
            self.exp_avg,
            self.exp_avg_sq,
            self.master,
            self.lr,
            self.step_count,
            grad_scale,
            self.settings,
            zero_grad,
        )
