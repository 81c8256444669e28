"""What describes a run: one frozen pydantic model a section, one docstring a field.

The docstrings become the descriptions of the JSON schema (`hiera-train config schema`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys are errors, attribute docstrings are descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunSection(Section):
    name: str = "hiera"
    """Name of the run; the run directory's default is runs/<name>."""
    dir: Path | None = None
    """Run directory: resolved run.yaml, metrics.jsonl, checkpoints, reconstructions, state."""
    seed: int = 0
    """Seed of weights, sample order, augmentation and masks."""


class ModelSection(Section):
    input_size: tuple[int, ...] = (224, 224)
    in_chans: int = 3
    embed_dim: int = 96
    num_heads: int = 1
    stages: tuple[int, ...] = (2, 3, 16, 3)
    q_pool: int = 2
    q_stride: tuple[int, ...] = (2, 2)
    mask_unit_size: tuple[int, ...] = (8, 8)
    mask_unit_attn: tuple[bool, ...] = (True, True, False, False)
    patch_kernel: tuple[int, ...] = (7, 7)
    patch_stride: tuple[int, ...] = (4, 4)
    patch_padding: tuple[int, ...] = (3, 3)
    mlp_ratio: float = 4.0
    drop_path_rate: float = 0.0
    sep_pos_embed: bool = False
    decoder_embed_dim: int = 512
    decoder_depth: int = 8
    decoder_num_heads: int = 16
    mask_ratio: float = 0.6


class DataSection(Section):
    kind: Literal["images", "array", "synthetic"] = "images"
    path: Path | None = None
    """Folder of pictures (any depth) or .npy file of shape [N, C, *input_size]."""
    val_path: Path | None = None
    """Held-out data; None takes val_fraction of the training data, split by file."""
    val_fraction: float = 0.02
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Area range of RandomResizedCrop (images)."""
    flip: bool = True
    mean: tuple[float, ...] | None = (0.485, 0.456, 0.406)
    std: tuple[float, ...] | None = (0.229, 0.224, 0.225)
    threads: int = 8
    """Decoding threads a rank."""
    prefetch: int = 4
    """Micro-batches prepared ahead of the training loop."""
    max_bad_files: int = 100
    """Unreadable files tolerated before the run stops with an error."""
    synthetic_samples: int = 1_281_167
    """Length of an epoch of synthetic data."""


class OptimSection(Section):
    name: Literal["adamw", "muon"] = "adamw"
    base_lr: float = 8e-4
    """Learning rate for a global batch of 256; the peak rate is base_lr * global_batch / 256."""
    lr: float | None = None
    """Peak learning rate; overrides base_lr when set."""
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.05
    warmup_epochs: float = 40
    warmup_steps: int | None = None
    """Overrides warmup_epochs when set."""
    clip_grad_norm: float | None = None
    muon_lr: float = 0.02
    muon_momentum: float = 0.95


class TrainSection(Section):
    global_batch: int = 4096
    """Samples an optimizer step over all ranks; never changes with the number of ranks."""
    micro_batch: int | None = None
    """Samples a rank computes at once; None: global_batch / world size. The rest is gradient accumulation."""
    epochs: float | None = 400
    steps: int | None = None
    """Optimizer steps; overrides epochs when set."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 compute with fp32 master weights on CUDA, fp32 on the CPU."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Run the step as one CUDA graph; auto: on CUDA."""
    eval_every: int = 0
    """Steps between validations; 0: only at the end."""
    eval_samples: int = 1024
    log_every: int = 50
    activation_checkpointing: tuple[int, ...] | Literal["all"] | None = None
    """Encoder stages (0-based) whose activations are recomputed in backward."""
    reconstruct_every: int = 0
    """Steps between reconstruction pictures; 0: only at the end."""


class CheckpointSection(Section):
    every_steps: int = 1000
    every_minutes: float | None = 30
    keep: int = Field(default=2, ge=2)
    allow_changes: bool = False
    """Resume although fields that matter differ from the run directory's run.yaml."""


class RuntimeSection(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    nproc_per_node: int | Literal["auto"] = "auto"
    """Worker processes a node; auto: one a GPU, or one on a machine without."""
    allocator: str = "default"
    """Allocator preset: default, large-batch, captured-ddp, debug; or a PYTORCH_ALLOC_CONF string."""
    cache_dir: Path | None = None
    """Persistent compile caches; None: $XDG_CACHE_HOME/hiera-train or a directory under /tmp."""
    threads: int | None = None
    """OMP threads a worker; None: cores / workers."""
    numa: bool = True
    max_restarts: int = 3
    grace_seconds: float = 60.0
    """Time workers get after a stop signal to write a checkpoint before they are killed."""
    collective_timeout_seconds: float = 600.0


class MetricsSection(Section):
    enabled: bool = True
    host: str = "0.0.0.0"
    """Address the metrics endpoint listens on; it serves numbers only and has no authentication."""
    port: int = 9400


class RunConfig(Section):
    """One run, whole."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    runtime: RuntimeSection = RuntimeSection()
    metrics: MetricsSection = MetricsSection()
