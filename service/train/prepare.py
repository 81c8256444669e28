"""Everything the loop needs, built from the config: data, model, optimizer, and where they were left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hiera_optim.optim.flat import FlatOptimizer
from hiera_optim.training import TrainStep
from service.config.checks import BatchSplit, check_world
from service.config.schema import RunConfig
from service.data import Source, Stream, open_data
from service.errors import UserError
from service.train.checkpoint import checkpoint_path, newest_whole, remove_leftovers
from service.train.initial import initial_weights
from service.train.model import build_fair_model, build_model, build_optimizer, restore
from service.train.progress import Console
from service.train.schedule import Schedule, make_schedule
from service.train.workers import Workers, check_same_weights


@dataclass(frozen=True)
class Run:
    """One run on this rank, ready for step number `first_step`."""

    config: RunConfig
    directory: Path
    workers: Workers
    split: BatchSplit
    train_data: Source
    val_data: Source | None
    """None: nothing is held out."""
    schedule: Schedule
    optimizer: FlatOptimizer
    train_step: TrainStep
    precision: str
    first_step: int
    """Optimizer steps done before this start."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.directory / "checkpoints"


def prepare(config: RunConfig, run_dir: Path, workers: Workers, console: Console) -> Run:
    """Builds a run and takes up its newest whole checkpoint, if it has one.

    Raises:
        UserError: data, checkpoint or configuration do not fit.
    """
    on_cuda = workers.device.type == "cuda"
    split = check_world(config, workers.world_size, on_cpu=not on_cuda)
    train_data, val_data = open_data(config.data, config.model, seed=config.run.seed)
    schedule = make_schedule(config.optim, config.train, len(train_data))
    if schedule.warmup >= schedule.total:
        console.warn(
            f"the warm-up of {schedule.warmup} steps is not over at the run's end, step {schedule.total}: "
            "set optim.warmup_epochs or optim.warmup_steps"
        )
    held_out = len(val_data) if val_data is not None else 0
    console.say(
        f"{len(train_data)} training samples, {held_out} held out; {schedule.total} steps of "
        f"{config.train.global_batch} ({config.train.global_batch * schedule.total / len(train_data):.4g} epochs), "
        f"ranks x micro-batches x samples: {workers.world_size} x {split.accumulation} x {split.micro_batch}"
    )
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if on_cuda else "fp32"
    fair = build_fair_model(config.model, config.run.seed)
    weights = {name: parameter.detach().clone() for name, parameter in fair.named_parameters()}
    model = build_model(config.train, fair, workers.device, precision)
    optimizer = build_optimizer(model, config.optim, schedule.peak, weights)
    first_step = _resume(run_dir / "checkpoints", optimizer, workers, console)
    if first_step == 0 and config.train.init_from is not None:
        optimizer.load_master_parameters(initial_weights(config.train, model))
        console.say(f"starting from {config.train.init_from}")
    check_same_weights(workers, optimizer.master_parameters())
    train_step = TrainStep(
        model,
        optimizer,
        micro_batch=split.micro_batch,
        accumulation=split.accumulation,
        mask_ratio=config.model.mask_ratio,
        seed=config.run.seed,
        clip_grad_norm=config.optim.clip_grad_norm,
        precision=precision,
        capture=on_cuda if config.train.capture == "auto" else config.train.capture == "on",
    )
    return Run(
        config=config,
        directory=run_dir,
        workers=workers,
        split=split,
        train_data=train_data,
        val_data=val_data,
        schedule=schedule,
        optimizer=optimizer,
        train_step=train_step,
        precision=precision,
        first_step=first_step,
    )


def make_stream(run: Run, start_step: int) -> Stream:
    """This rank's training samples from step `start_step` on."""
    config = run.config
    return Stream(
        run.train_data,
        global_batch=config.train.global_batch,
        micro_batch=run.split.micro_batch,
        rank=run.workers.rank,
        world_size=run.workers.world_size,
        start_step=start_step,
        seed=config.run.seed,
        threads=config.data.threads,
        prefetch=config.data.prefetch,
        pin=run.workers.device.type == "cuda",
    )


def _resume(folder: Path, optimizer: FlatOptimizer, workers: Workers, console: Console) -> int:
    """Loads the newest whole checkpoint on all ranks; returns its step, 0 if there is none."""
    step = 0
    if workers.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.dir: {folder} cannot be made ({error.strerror}); mend it or choose another") from None
        remove_leftovers(folder)
        found = newest_whole(folder, console.warn, set_aside=True)
        step = found[0] if found else 0
    (step,) = workers.from_first([step])
    if step:
        path = checkpoint_path(folder, step)
        restore(path, optimizer)
        console.say(f"resuming from {path.name}")
    return step
