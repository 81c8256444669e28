"""What describes a run: one frozen pydantic model a section, one docstring a field.

The docstrings become the descriptions of the JSON schema (`hiera-train config schema`). Bounds of a
single value are here; what several values have to agree on is in `service.config.checks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from service.config.allocator import allocator_settings
from service.config.cluster import ClusterSection
from service.config.fields import ExpandedPath, Natural, Paddings, Positive, Section, Sizes

BUILTIN = "builtin:"
"""What data.path starts with when it names pictures that installed packages ship instead of a path."""
MAX_SECONDS = 604_800.0
"""A week: the timers of torch and of the system overflow long after."""
REFERENCE_BATCH = 256
"""The global batch that base_lr is given for (linear scaling rule, as in MAE, arXiv 2111.06377)."""


class RunSection(Section):
    """Name, place and seed of the run."""

    name: str = Field(default="hiera", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run: letters, digits, '.', '_' and '-'; the run directory's default is runs/<name>."""
    dir: ExpandedPath | None = None
    """Run directory: resolved run.yaml, metrics.jsonl, checkpoints, pictures, state; null: runs/<name>."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of weights, sample order, augmentation and masks."""

    @property
    def directory(self) -> Path:
        """The run directory: `dir`, or runs/<name> in the current directory."""
        return self.dir if self.dir is not None else Path("runs") / self.name


class ModelSection(Section):
    """FAIR's MaskedAutoencoderHiera, by the names of its own arguments, and the mask ratio."""

    input_size: Sizes = (224, 224)
    """Size of a sample without channels: [length], [height, width] or [frames, height, width]. Each must
    divide by patch_stride x q_stride^(stages - 1)."""
    in_chans: int = Field(default=3, gt=0)
    """Input channels; pictures give 3, or 1 (grey)."""
    embed_dim: int = Field(default=96, gt=0)
    """Channels of the first stage; each later stage doubles them."""
    num_heads: int = Field(default=1, gt=0)
    """Attention heads of the first stage; each later stage doubles them."""
    stages: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2, 3, 16, 3)
    """Transformer blocks of each stage."""
    q_pool: int = Field(default=2, ge=0)
    """How many of the stage transitions pool the tokens; less than the number of stages."""
    q_stride: Sizes = (2, 2)
    """Pooling stride of a stage transition, one number a dimension; 1 in the time dimension of video."""
    mask_unit_size: Sizes = (8, 8)
    """Tokens along each side of a mask unit; q_stride^(stages - 1) for masked autoencoding."""
    mask_unit_attn: Annotated[tuple[bool, ...], Field(min_length=1)] = (True, True, False, False)
    """For each stage: true for attention inside mask units, false for global attention."""
    patch_kernel: Sizes = (7, 7)
    """Kernel of the patch embedding."""
    patch_stride: Sizes = (4, 4)
    """Stride of the patch embedding: input values along each side of a token."""
    patch_padding: Paddings = (3, 3)
    """Zero padding of the patch embedding."""
    mlp_ratio: float = Field(default=4.0, gt=0)
    """Hidden width of each MLP, as a multiple of the block's channels."""
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic depth of the last encoder block; earlier blocks get linearly less."""
    sep_pos_embed: bool = False
    """Separate position embeddings of time and space (3-D input only)."""
    decoder_embed_dim: int = Field(default=512, gt=0)
    """Channels of the decoder."""
    decoder_depth: int = Field(default=8, ge=0)
    """Transformer blocks of the decoder."""
    decoder_num_heads: int = Field(default=16, gt=0)
    """Attention heads of the decoder."""
    mask_ratio: float = Field(default=0.6, gt=0, lt=1)
    """Share of the mask units that are hidden; int(units x (1 - mask_ratio)) are kept."""

    def hiera_arguments(self) -> dict[str, Any]:
        """Keyword arguments of FAIR's MaskedAutoencoderHiera: every field but mask_ratio."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "mask_ratio"}


class DataSection(Section):
    """Training and held-out samples, and how they are read."""

    kind: Literal["images", "array", "synthetic"] = "images"
    """images: a folder of pictures; array: a .npy file; synthetic: made up, to test and to measure speed."""
    path: ExpandedPath | None = None
    """Folder of pictures (any depth) or .npy file of shape [N, in_chans, *input_size]; or
    builtin:photographs, the pictures that scikit-image and scikit-learn ship."""
    val_path: ExpandedPath | None = None
    """Held-out data of the same kind; null: val_fraction of the training data, split by file."""
    val_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the training data that is held out when val_path is null, at least one sample."""
    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.2, 1.0)
    """Area range of RandomResizedCrop, as shares of the picture (images)."""
    flip: bool = True
    """Mirror half of the pictures left to right (images)."""
    mean: tuple[float, ...] | None = (0.485, 0.456, 0.406)
    """Mean of each channel, subtracted (pictures: of values in 0 to 1); null: data are used as they are."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, divided by; null together with mean."""
    threads: int = Field(default=8, gt=0, le=256)
    """Reading and decoding threads a rank."""
    prefetch: int = Field(default=4, gt=0, le=1024)
    """Micro-batches prepared ahead of the training loop."""
    max_bad_files: int = Field(default=100, ge=0)
    """Unreadable files that are skipped before the run stops with an error."""
    synthetic_samples: int = Field(default=1_281_167, gt=0)
    """Samples in an epoch of synthetic data; the default is ImageNet-1K's."""

    @model_validator(mode="after")
    def _ranges(self) -> DataSection:
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(f"crop_scale: {list(self.crop_scale)} is not a range; the smaller share comes first")
        if (self.mean is None) != (self.std is None):
            missing, given = ("mean", "std") if self.mean is None else ("std", "mean")
            raise ValueError(f"{missing}: null although {given} is set; set both or neither")
        return self


class OptimSection(Section):
    """Optimizer and learning rate schedule: linear warm-up from 0, then a cosine down to min_lr."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the weight matrices, with adamw for all other parameters."""
    base_lr: float = Field(default=5e-5, gt=0)
    """Learning rate for a global batch of 256; the peak rate is base_lr x global_batch / 256."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; overrides base_lr when set."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the cosine."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled weight decay; biases, norms and position embeddings get none."""
    warmup_epochs: float = Field(default=40, ge=0)
    """Epochs of linear warm-up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up; overrides warmup_epochs when set."""
    clip_grad_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient; null: no clipping."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon's matrices; same schedule."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""

    def peak_lr(self, global_batch: int) -> float:
        """Learning rate at the end of warm-up: `lr`, or base_lr x global_batch / 256."""
        return self.lr if self.lr is not None else self.base_lr * global_batch / REFERENCE_BATCH


class TrainSection(Section):
    """Length of the run, batch and precision, and what happens at which step."""

    global_batch: int = Field(default=4096, gt=0)
    """Samples an optimizer step over all ranks; never changes with the number of ranks."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Samples a rank computes at once; null: an equal part of its share, at most 256, on a CPU 32. The rest
    is gradient accumulation.
    """
    epochs: float | None = Field(default=400, gt=0)
    """Length of the run in passes over the training data."""
    steps: int | None = Field(default=None, gt=0)
    """Length of the run in optimizer steps; overrides epochs when set."""
    init_from: ExpandedPath | None = None
    """Weights to start from: a run directory (its newest checkpoint), a checkpoint, or exported or FAIR's weights as
    .safetensors or .pth; null: random. A run that has a checkpoint of its own goes on from that."""
    interpolate_position_embeddings: bool = False
    """Resample the position embeddings of init_from when they are of another model.input_size."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 compute with fp32 master weights on CUDA, fp32 on the CPU."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Run the step as one CUDA graph; auto: on CUDA."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between validations; 0: only at the end."""
    eval_samples: int = Field(default=1024, gt=0)
    """Held-out samples of a validation, at most."""
    log_every: int = Field(default=50, gt=0)
    """Steps between log lines, metric updates and checks for non-finite values."""
    activation_checkpointing: tuple[Natural, ...] | Literal["all"] | None = None
    """Encoder stages (0-based) whose activations are recomputed in backward; all; null: none."""
    reconstruct_every: int = Field(default=0, ge=0)
    """Steps between reconstruction pictures; 0: only at the end."""

    @model_validator(mode="after")
    def _length(self) -> TrainSection:
        if self.epochs is None and self.steps is None:
            raise ValueError("epochs: null although steps is null too; set one of them")
        return self


class CheckpointSection(Section):
    """When checkpoints are written and how many are kept."""

    every_steps: int = Field(default=1000, gt=0)
    """Steps between checkpoints."""
    every_minutes: float | None = Field(default=30, gt=0)
    """Minutes between checkpoints, beside every_steps; null: by steps only."""
    keep: int = Field(default=2, ge=2)
    """Newest checkpoints that are kept; at least 2, so that a whole one is left when a save is cut short."""
    allow_changes: bool = False
    """Resume although fields that matter differ from the run directory's run.yaml."""


class RuntimeSection(Section):
    """Where and how the processes run; nothing here changes what is trained."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where there is a GPU, else cpu."""
    nproc_per_node: Positive | Literal["auto"] = "auto"
    """Worker processes a node; auto: one a GPU, or one on a machine without."""
    allocator: str = Field(default="default", min_length=1)
    """Allocator preset: default, large-batch, captured-ddp, debug; or a PYTORCH_ALLOC_CONF string."""
    cache_dir: ExpandedPath | None = None
    """Persistent compile caches; null: $XDG_CACHE_HOME/hiera-train or a directory under /tmp."""
    cache_seed: ExpandedPath | None = None
    """Directory on a shared file system with packed compile caches, one file for each kind of node: a node fills its
    own cache from there before it starts; the first run that finishes makes the file. Null: every node compiles."""
    threads: int | None = Field(default=None, gt=0)
    """OMP threads a worker; null: cores / workers."""
    numa: bool = True
    """Bind each worker to the cores and the memory next to its GPU."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that failed workers are started again before the run fails."""
    grace_seconds: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Seconds workers get after a stop signal to write a checkpoint before they are killed."""
    collective_timeout_seconds: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """Seconds a rank waits for the others in a collective before it gives up."""

    @field_validator("allocator")
    @classmethod
    def _known_allocator(cls, value: str) -> str:
        allocator_settings(value)
        return value


class MetricsSection(Section):
    """The Prometheus endpoint, one a node."""

    enabled: bool = True
    """Serve /metrics while the run lives."""
    host: str = Field(default="0.0.0.0", min_length=1)
    """Address the metrics endpoint listens on; it serves numbers only and has no authentication."""
    port: int = Field(default=9400, ge=0, le=65535)
    """Port of the metrics endpoint; 0: any free one, which is logged."""


class RunConfig(Section):
    """One run of hiera-train, whole."""

    run: RunSection = RunSection()
    """Name, place and seed of the run."""
    model: ModelSection = ModelSection()
    """FAIR's MaskedAutoencoderHiera, by the names of its own arguments, and the mask ratio."""
    data: DataSection = DataSection()
    """Training and held-out samples, and how they are read."""
    optim: OptimSection = OptimSection()
    """Optimizer and learning rate schedule."""
    train: TrainSection = TrainSection()
    """Length of the run, batch and precision, and what happens at which step."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are written and how many are kept."""
    runtime: RuntimeSection = RuntimeSection()
    """Where and how the processes run."""
    metrics: MetricsSection = MetricsSection()
    """The Prometheus endpoint."""
    cluster: ClusterSection = ClusterSection()
    """Nodes, their hardware and network, and the schedulers that place them."""
