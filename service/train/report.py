"""Where the numbers of a run go: Prometheus, metrics.jsonl, and the console."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiera_optim.training import StepOutput
from service.data import Stream, source_index
from service.errors import TrainingError
from service.launch import state
from service.metrics.client import MetricsClient
from service.train.checkpoint import Saved, checkpoint_path, list_checkpoints, read_meta
from service.train.compiling import CompileWatch
from service.train.evaluate import Validation
from service.train.flops import peak_flops, training_flops
from service.train.prepare import Run, make_stream
from service.train.progress import Console, MetricsLog, StepRow, StepValues


@dataclass(frozen=True)
class Interval:
    """Time between two log events."""

    step: int
    """The later event's."""
    samples_per_second: float
    """Of the whole run; nan when no step but the first, which compiles, lies between."""
    data_wait_seconds: float


class Reporter:
    """Takes values at step boundaries; the only place that knows metric names."""

    def __init__(self, run: Run, metrics: MetricsClient, console: Console, stream: Stream) -> None:
        self._run, self._metrics, self._console, self._stream = run, metrics, console, stream
        first = run.workers.rank == 0
        self._log = MetricsLog(run.directory / "metrics.jsonl", run.first_step) if first else None
        (self._validated,) = run.workers.from_first(
            [int(self._log is not None and self._log.validated(run.first_step))]
        )
        self._share = run.config.train.global_batch // run.workers.world_size
        self._total = run.schedule.total
        device = run.workers.device
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._flops = training_flops(run.config.model)
        # Before the first step, which compiles. Without a GPU no kernel runs, and Triton need not be imported.
        self._compiled = CompileWatch().install() if device.type == "cuda" else CompileWatch()
        self._sent_hits = self._sent_misses = 0
        self._boundary = self._marked = time.perf_counter()
        self._marked_step = run.first_step
        self._paused = self._waited = 0.0
        self._bad_files = 0
        self._log_failed = False

    def validated(self, step: int) -> bool:
        """Whether the step this start began with already has its validation on record; the same on all
        ranks.
        """
        return step == self._run.first_step and bool(self._validated)

    def step_done(self, step: int) -> None:
        """A step boundary: counts samples and times the step, without asking the device anything."""
        now = time.perf_counter()
        self._metrics.observe("step_seconds", now - self._boundary)
        self._metrics.add("samples_total", self._share)
        if self._log is not None:
            self._metrics.set("step", step)
        self._boundary = now
        self._console.advance()

    def pause_ended(self, began: float) -> None:
        """Something other than training took the time since `began` (time.perf_counter): keep it out of
        the rates.
        """
        now = time.perf_counter()
        self._paused += now - began
        self._boundary = now

    def first_step(self, seconds: float, since_start: float) -> None:
        """How long the first step took, with compilation and capture, and how long all took until its end."""
        if self._run.workers.device.type == "cuda":
            self._metrics.set("compile_seconds", seconds)
        self._compilations()
        if self._run.workers.rank == 0:
            self._metrics.set("time_to_first_step_seconds", since_start)
        self._marked, self._paused, self._marked_step = time.perf_counter(), 0.0, self._run.first_step + 1

    def _compilations(self) -> None:
        hits, misses = self._compiled.hits, self._compiled.misses
        self._metrics.add("compile_cache_hits_total", hits - self._sent_hits)
        self._metrics.add("compile_cache_misses_total", misses - self._sent_misses)
        self._sent_hits, self._sent_misses = hits, misses

    def interval(self, step: int) -> Interval:
        """What the clocks say at a log event after `step`, since the last one; taken when it is enqueued."""
        now, waited = time.perf_counter(), self._stream.wait_seconds
        steps, seconds = step - self._marked_step, max(1e-9, now - self._marked - self._paused)
        rate = steps * self._run.config.train.global_batch / seconds if steps else math.nan
        interval = Interval(step, rate, waited - self._waited)
        self._marked, self._paused, self._marked_step, self._waited = now, 0.0, step, waited
        return interval

    def steps(self, interval: Interval, rows: Sequence[StepRow]) -> None:
        """A log event; `rows` are the steps since the last one, of which the mean loss is reported."""
        run, step, rate = self._run, interval.step, interval.samples_per_second
        batch = run.config.train.global_batch
        loss = sum(row.loss for row in rows) / len(rows)
        epoch = step * batch / len(run.train_data)
        eta = (self._total - step) * batch / rate if rate > 0 else math.nan
        self._worker_metrics(interval)
        if self._log is None:
            return
        gauges = {
            "loss": loss,
            "grad_norm": rows[-1].grad_norm,
            "learning_rate": run.schedule(step - 1),
            "epoch": epoch,
            "progress_ratio": step / self._total,
        }
        for name, value in gauges.items():
            self._metrics.set(name, value)
        if math.isfinite(rate):
            self._metrics.set("samples_per_second", rate)
            self._metrics.set("eta_seconds", eta)
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "samples": step * batch,
                "loss": loss,
                "lr": run.schedule(step - 1),
                "grad_norm": rows[-1].grad_norm,
                "samples_per_second": rate,
                "data_wait_seconds": interval.data_wait_seconds,
                "time": time.time(),
            }
        )
        self._console.report(step, loss, rate, eta)

    def _worker_metrics(self, interval: Interval) -> None:
        metrics, device, rate = self._metrics, self._run.workers.device, interval.samples_per_second
        metrics.add("data_wait_seconds_total", interval.data_wait_seconds)
        self._compilations()
        bad_files = self._stream.bad_files
        metrics.add("bad_files_total", bad_files - self._bad_files)
        self._bad_files = bad_files
        if device.type == "cuda":
            metrics.set("memory_allocated_bytes", torch.cuda.memory_allocated(device))
            metrics.set("memory_reserved_bytes", torch.cuda.memory_reserved(device))
            metrics.set("memory_peak_bytes", torch.cuda.max_memory_allocated(device))
            if self._peak is not None and math.isfinite(rate):
                world_size = self._run.workers.world_size
                metrics.set("mfu_ratio", rate * self._flops / world_size / self._peak)

    def validation(self, step: int, result: Validation) -> None:
        """The validation after `step`."""
        if self._log is None:
            return
        self._metrics.set("validation_loss", result.loss)
        self._write(
            {
                "step": step,
                "val_loss": result.loss,
                "val_trivial_loss": result.trivial_loss,
                "val_samples": result.samples,
                "time": time.time(),
            }
        )
        self._console.say(
            f"step {step}: validation loss {result.loss:.4f} on {result.samples} held-out samples "
            f"(predicting each patch's mean: {result.trivial_loss:.4f})"
        )

    def saved(self, saved: Saved) -> bool:
        """The outcome of a checkpoint's background write; True if the checkpoint is there."""
        if saved.error is None:
            state.report("running", step=saved.step)
            self._metrics.observe("checkpoint_seconds", saved.seconds)
            self._metrics.set("last_checkpoint_step", saved.step)
            self._metrics.set("last_checkpoint_timestamp_seconds", time.time())
            return True
        self._metrics.add("checkpoint_failures_total", 1)
        error = saved.error
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "; free some space" if isinstance(error, OSError) and error.errno == errno.ENOSPC else ""
        path = checkpoint_path(self._run.checkpoints, saved.step)
        self._console.warn(f"could not write {path}: {why}{hint}; older checkpoints are untouched")
        return False

    def nonfinite(self, steps: int) -> None:
        """This many steps were not finite; the run ends."""
        if self._run.workers.rank == 0:
            self._metrics.add("nonfinite_total", steps)
        self._metrics.flush()

    def _write(self, event: dict[str, float]) -> None:
        assert self._log is not None
        failure = self._log.write(event)
        if failure and not self._log_failed:
            self._console.warn(f"{failure}; training goes on without this record")
        self._log_failed = failure is not None


class StepLog:
    """Values of the steps since the last log event: read late, checked, and handed to the reporter.

    A checkpoint carries the losses since the last log event along, so that the event after a resume reports
    what it would have without the interruption.
    """

    def __init__(self, run: Run, report: Reporter) -> None:
        self._run, self._report = run, report
        capacity = min(run.config.train.log_every, run.schedule.total)
        self._values = StepValues(capacity, run.workers.device)
        self._rows: list[StepRow] = []
        self._step = run.first_step
        self._received = run.first_step
        self._marked: Interval | None = None
        if run.first_step:
            meta = read_meta(checkpoint_path(run.checkpoints, run.first_step))
            self._rows = [StepRow(loss, math.nan, 0.0) for loss in meta["losses_since_log"]]

    @property
    def losses(self) -> list[float]:
        """Losses since the last log event, of steps that have been received."""
        return [row.loss for row in self._rows]

    def record(self, step: int, output: StepOutput) -> None:
        """Keeps what `step` gave, on the device."""
        self._values.record(output)
        self._step = step

    def mark(self, step: int) -> None:
        """Makes the steps up to `step`, the newest, a log event: their values go to the host."""
        self._values.send()
        self._marked = self._report.interval(step)

    def settle(self) -> None:
        """Receives what is on its way and reports the log event that was marked.

        Raises:
            TrainingError: a step was not finite; raised on all ranks.
        """
        rows = self._values.receive()
        for row in rows:
            self._received += 1
            if not row.finite:
                self._fail(self._received, row, sum(not r.finite for r in rows))
        self._rows += rows
        if self._marked is not None:
            self._report.steps(self._marked, self._rows)
            self._rows, self._marked = [], None

    def flush(self) -> None:
        """As `settle`, for all steps up to the newest; waits for the device."""
        self.settle()
        self._values.send()
        self.settle()

    def _fail(self, step: int, row: StepRow, count: int) -> None:
        run = self._run
        batch = run.config.train.global_batch
        found = run.workers.gather([*_nonfinite_sample(run, step), int(row.own_nonfinite > 0)])
        self._report.nonfinite(count)
        inputs = [
            f"sample {sample} on rank {rank}, {_where(run, sample)}"
            for rank, (bad, sample, _) in enumerate(found)
            if bad
        ]
        ranks = [str(rank) for rank, (_, _, own) in enumerate(found) if own]
        if inputs:
            cause = f"the input is not: {'; '.join(inputs[:3])}"
        else:
            cause = f"rank {', '.join(ranks)}, samples {(step - 1) * batch} to {step * batch - 1}"
        good = [path.name for saved, path in list_checkpoints(run.checkpoints) if saved < step]
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
        remedy = "Lower optim.lr or optim.base_lr, or set optim.clip_grad_norm"
        raise TrainingError(
            f"loss or gradient is not finite at step {step} ({cause}); {kept}.\n"
            f"{'Mend the data' if inputs else remedy}, then run the same command again."
        )


def _where(run: Run, sample: int) -> str:
    return run.train_data.name(source_index(sample, len(run.train_data), run.config.run.seed))


def _nonfinite_sample(run: Run, step: int) -> tuple[int, int]:
    """Reads this rank's samples of a step again: (1, sample id) of the first with a non-finite value, or
    (0, 0).
    """
    stream = make_stream(run, step - 1)
    try:
        for _ in range(run.split.accumulation):
            x, sample_ids = next(stream)
            bad = ~torch.isfinite(x).flatten(1).all(dim=1)
            if bool(bad.any()):
                return 1, int(sample_ids[bad][0])
    finally:
        stream.close()
    return 0, 0
