"""Learning-rate schedule and run length, as pure functions of the step.

Nothing here has state, so a resumed run has the learning rates of an uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.config.schema import OptimSection, TrainSection


def total_steps(train: TrainSection, epoch_samples: int) -> int:
    """Optimizer steps of the whole run; `epoch_samples` is the number of training samples in an epoch."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None  # TrainSection takes no run without a length
    return max(1, int(train.epochs * epoch_samples / train.global_batch))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then half a cosine to `minimum` (Loshchilov & Hutter, arXiv:1608.03983).

    The first step already has a learning rate above 0, the last one of the run still has one above `minimum`.
    """

    peak: float
    minimum: float
    warmup: int
    """Steps of warm-up."""
    total: int
    """Steps of the run."""

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.minimum + (self.peak - self.minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(optim: OptimSection, train: TrainSection, epoch_samples: int) -> Schedule:
    """The run's schedule; the peak is optim.lr, or base_lr * global_batch / 256 (arXiv:1706.02677)."""
    peak = optim.peak_lr(train.global_batch)
    if optim.warmup_steps is not None:
        warmup = optim.warmup_steps
    else:
        warmup = int(optim.warmup_epochs * epoch_samples / train.global_batch)
    return Schedule(peak=peak, minimum=optim.min_lr, warmup=warmup, total=total_steps(train, epoch_samples))
