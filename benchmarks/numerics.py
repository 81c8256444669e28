"""Our loss and gradients against FAIR's model in float64 on the GPU, beside FAIR's own bf16.

No speed is reported by `make bench` unless this passes: the bf16 loss within 5e-3 of float64, and the gradient no
further from float64 than FAIR's own bf16 gradient is (5 % allowed for noise), over all parameters together.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.contenders import Case, build_model, inputs
from hiera_optim import fast
from hiera_optim.geometry import Geometry
from hiera_optim.masks import random_mask

CASES = [
    Case(), Case(channels=3, mask_ratio=0.75), Case("tiny", q_pool=1), Case("small", q_pool=3, mask_ratio=0.5),
    Case("base-plus"), Case("large"), Case("huge"), Case(dims=1),
]  # fmt: skip


def loss_of_fair(model: nn.Module, g: Geometry, x: Tensor, mask: Tensor) -> Tensor:
    """FAIR's loss; in 1-D, where it has none, of its own encoder and decoder with the documented label."""
    if g.spatial_dims > 1:
        loss: Tensor = model(x, mask=mask)[0]
        return loss
    latent, _ = model.forward_encoder(x, 0.6, mask=mask)  # type: ignore[operator]
    pred, pred_mask = model.forward_decoder(latent, mask)  # type: ignore[operator]
    patch = x.unfold(2, g.pred_stride, g.pred_stride).permute(0, 2, 3, 1).flatten(2)
    label = (patch - patch.mean(-1, keepdim=True)) / (patch.var(-1, keepdim=True) + 1e-6) ** 0.5
    return ((pred - label)[~pred_mask] ** 2).mean()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def compare(case: Case, batch: int = 4) -> dict[str, object]:
    """Errors of one case at a small batch."""
    case = replace(case, batch=batch)
    ours = build_model(case)
    for p in ours.parameters():
        p.data += 0.02 * torch.randn_like(p)
    fair, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    g = Geometry.from_model(ours)
    x = inputs(case)
    mask, keep, drop = random_mask(batch, g.num_mask_units, g.num_kept(case.mask_ratio), "cuda")
    losses = [
        loss_of_fair(exact, g, x.double(), mask),
        loss_of_fair(fair, g, x, mask),
        fast.mae_loss(ours, g, x, mask, keep, drop)[0],
    ]
    for loss in losses:
        loss.backward()
    want, theirs, mine = (gradient(m) for m in (exact, fair, ours))
    reference = losses[0].item()
    per_parameter = {}
    for (name, p), q, r in zip(ours.named_parameters(), exact.parameters(), fair.parameters(), strict=True):
        if p.grad is not None and q.grad is not None and r.grad is not None:
            scale = q.grad.norm()
            mine_error, fair_error = ((t.grad.double() - q.grad).norm() / scale for t in (p, r))
            per_parameter[name] = (mine_error.item(), fair_error.item())
    worst = max(per_parameter.items(), key=lambda item: item[1][0] / max(item[1][1], 1e-4))
    result: dict[str, object] = {
        "case": case.name,
        "loss": reference,
        "loss_error": abs(losses[2].item() / reference - 1),
        "fair_loss_error": abs(losses[1].item() / reference - 1),
        "gradient_error": ((mine - want).norm() / want.norm()).item(),
        "fair_gradient_error": ((theirs - want).norm() / want.norm()).item(),
        "worst": [worst[0], *worst[1]],
    }
    passed = result["loss_error"] < 5e-3 and result["gradient_error"] <= 1.05 * result["fair_gradient_error"]  # type: ignore[operator]
    return result | {"passed": bool(passed)}


def main() -> int:
    failed = 0
    for case in CASES:
        result = compare(case)
        failed += not result["passed"]
        print(json.dumps({k: round(v, 7) if isinstance(v, float) else v for k, v in result.items()}), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
