"""Which changes of the configuration make a resumed run another run.

Every field is in exactly one of the two tables below (a test checks it), so a new field needs a decision.
The question is always: would the weights at step N, up to rounding, be those of the uninterrupted run?
"""

from __future__ import annotations

from collections.abc import Callable

from service.config.cluster import ClusterSection, KubernetesSection, SlurmSection
from service.config.schema import ModelSection, RunConfig

IDENTITY: dict[str, str] = {
    "run.seed": "weights, sample order, augmentation and masks are functions of it",
    **{f"model.{name}": "another model, another target, or other regularisation" for name in ModelSection.model_fields},
    "data.kind": "other data",
    "data.path": "the same path is the only sign of the same data that a configuration has",
    "data.val_path": "setting or dropping it moves samples between training and validation",
    "data.val_fraction": "moves samples between training and validation",
    "data.crop_scale": "other augmentation",
    "data.flip": "other augmentation",
    "data.mean": "other inputs and targets",
    "data.std": "other inputs and targets",
    "data.synthetic_samples": "the length of an epoch, hence order and schedule",
    "optim.name": "another optimizer, whose state the checkpoint does not hold",
    "optim.base_lr": "schedule",
    "optim.lr": "schedule",
    "optim.min_lr": "schedule",
    "optim.betas": "recipe",
    "optim.eps": "recipe",
    "optim.weight_decay": "recipe",
    "optim.warmup_epochs": "schedule",
    "optim.warmup_steps": "schedule",
    "optim.clip_grad_norm": "recipe",
    "optim.muon_lr": "schedule",
    "optim.muon_momentum": "recipe",
    "train.global_batch": "which samples a step sees, hence the meaning of the step counter",
    "train.epochs": "the cosine's length: every later learning rate",
    "train.steps": "the cosine's length: every later learning rate",
    "train.init_from": "other weights at the start",
    "train.interpolate_position_embeddings": "other weights at the start",
}
"""Fields that make another run, and why."""

FREE: dict[str, str] = {
    "run.name": "a label",
    "run.dir": "the directory may be moved or mounted elsewhere",
    "data.threads": "speed",
    "data.prefetch": "speed",
    "data.max_bad_files": "only when to give up; raising it is how one goes on after giving up",
    "train.micro_batch": "only how the global batch is summed; the number of ranks changes that too",
    "train.precision": "rounding only: checkpoints hold fp32 weights either way; fp32 helps to find a NaN",
    "train.capture": "the captured step is the same step",
    "train.eval_every": "looks, does not touch",
    "train.eval_samples": "looks, does not touch",
    "train.log_every": "looks, does not touch",
    "train.activation_checkpointing": "the same gradients for less memory",
    "train.reconstruct_every": "looks, does not touch",
    "checkpoint.every_steps": "when to save",
    "checkpoint.every_minutes": "when to save",
    "checkpoint.keep": "how many to keep",
    "checkpoint.allow_changes": "the permission itself",
    "runtime.device": "where",
    "runtime.nproc_per_node": "a sample's place in the run does not depend on the number of ranks",
    "runtime.allocator": "memory",
    "runtime.cache_dir": "where",
    "runtime.cache_seed": "where",
    "runtime.threads": "speed",
    "runtime.numa": "speed",
    "runtime.max_restarts": "when to give up",
    "runtime.grace_seconds": "how long to wait",
    "runtime.collective_timeout_seconds": "how long to wait",
    "metrics.enabled": "looks, does not touch",
    "metrics.host": "looks, does not touch",
    "metrics.port": "looks, does not touch",
    **{
        f"{section}.{name}": "where and how many; a sample's place does not depend on it"
        for section, model in (
            ("cluster", ClusterSection),
            ("cluster.slurm", SlurmSection),
            ("cluster.kubernetes", KubernetesSection),
        )
        for name in model.model_fields
        if (section, name) not in (("cluster", "slurm"), ("cluster", "kubernetes"))
    },
}
"""Fields that may change between two starts of one run, and why."""

_UNUSED_WHEN: dict[str, Callable[[RunConfig], bool]] = {
    "optim.base_lr": lambda config: config.optim.lr is not None,
    "optim.warmup_epochs": lambda config: config.optim.warmup_steps is not None,
    "optim.muon_lr": lambda config: config.optim.name != "muon",
    "optim.muon_momentum": lambda config: config.optim.name != "muon",
    "train.epochs": lambda config: config.train.steps is not None,
    "train.interpolate_position_embeddings": lambda config: config.train.init_from is None,
    "data.path": lambda config: config.data.kind == "synthetic",
    "data.val_path": lambda config: config.data.kind == "synthetic",
    "data.val_fraction": lambda config: config.data.val_path is not None and config.data.kind != "synthetic",
    "data.crop_scale": lambda config: config.data.kind != "images",
    "data.flip": lambda config: config.data.kind != "images",
    "data.synthetic_samples": lambda config: config.data.kind != "synthetic",
}
"""Fields that another one overrides: a difference that neither configuration uses is none."""


def changed_fields(old: RunConfig, new: RunConfig) -> list[str]:
    """Fields, as section.field in the schema's order, whose change makes `new` another run than `old`."""
    changed = []
    for dotted in IDENTITY:
        section, name = dotted.split(".")
        if getattr(getattr(old, section), name) == getattr(getattr(new, section), name):
            continue
        unused = _UNUSED_WHEN.get(dotted)
        if unused is None or not (unused(old) and unused(new)):
            changed.append(dotted)
    return changed


def describe_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """`changed_fields` with their values, e.g. "train.steps: 100 -> 200"."""
    lines = []
    for dotted in changed_fields(old, new):
        section, name = dotted.split(".")
        before, after = (config.model_dump(mode="json")[section][name] for config in (old, new))
        lines.append(f"{dotted}: {_show(before)} -> {_show(after)}")
    return lines


def _show(value: object) -> str:
    return "null" if value is None else str(value)
