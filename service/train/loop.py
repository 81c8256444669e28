"""The training loop: fetch, step, log if due, save if due, evaluate if due, stop if signalled.

Everything that varies between runs comes from the config, everything that varies between steps from the
step's number, so a run that goes on from a checkpoint does what it would have done without the
interruption.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from service.config.schema import RunConfig
from service.errors import TrainingError, UserError
from service.metrics.client import MetricsClient
from service.train.checkpoint import Saver
from service.train.evaluate import evaluate
from service.train.model import checkpoint_meta, checkpoint_tensors
from service.train.prepare import Run, make_stream, prepare
from service.train.progress import Console
from service.train.reconstruct import draw_held_out, picture_path
from service.train.report import Reporter, StepLog
from service.train.signals import StopRequest, signal_name
from service.train.workers import BoundaryVote, Workers, join_workers, shorten_timeouts

STEPS_AHEAD = 2
"""Optimizer steps that the host may enqueue before an older one is done: enough that the GPU never idles, few
enough that input buffers do not pile up and a stop signal takes effect soon."""
LAST_SAVE_DELAYS = (5.0, 15.0, 40.0)
"""Seconds between attempts to write the last checkpoint of a complete run: time for somebody to make room."""
WAIT_SLICE_SECONDS = 0.5
"""A stop signal ends the wait between these attempts after no longer than this."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; a run that failed raises instead."""

    status: Literal["finished", "stopped"]
    step: int
    reason: str = ""


def train(config: RunConfig, run_dir: Path, stop: StopRequest, metrics: MetricsClient, started: float) -> Outcome:
    """Trains until the run is complete or a stop signal arrives, on this rank.

    Args:
        config: the resolved configuration.
        run_dir: an existing folder, the same for all ranks; nobody else writes to it.
        stop: the installed signal handlers.
        metrics: where numbers go.
        started: Unix time at which this start of the run began, for time_to_first_step_seconds.

    Raises:
        UserError: data, checkpoint or configuration do not fit, or the last checkpoint could not be written.
        TrainingError: a loss or gradient is not finite.
    """
    metrics.phase("starting")
    workers = join_workers(config.runtime)
    console = Console(speaks=workers.rank == 0)
    run = prepare(config, run_dir, workers, console)
    schedule, total, minutes = run.schedule, run.schedule.total, config.checkpoint.every_minutes
    saver = Saver(run.checkpoints, config.checkpoint.keep)
    stream = make_stream(run, run.first_step)
    report = Reporter(run, metrics, console, stream)
    log = StepLog(run, report)
    vote = BoundaryVote(workers)
    pacer = Pacer(workers.device)
    step, saved_at, postponed = run.first_step, time.monotonic(), False

    with closing(stream), closing(saver), closing(console):
        metrics.phase("compiling")
        console.begin(step, total)
        vote.cast(stop.number, save=False)
        vote.take_in()

        while True:
            # evaluate if due; a start that was killed after this step's checkpoint may have done so already
            paused = time.perf_counter()
            evaluation_due = due(step, config.train.eval_every, total) and not report.validated(step)
            if run.val_data is not None and evaluation_due:
                metrics.phase("validating")
                log.flush()
                result = evaluate(
                    run.train_step,
                    run.val_data,
                    micro_batch=run.split.micro_batch,
                    workers=workers,
                    samples=config.train.eval_samples,
                    threads=config.data.threads,
                    stopping=partial(vote.stopping, stop),
                )
                if result is not None:
                    report.validation(step, result)
                metrics.phase("training")
            drawing_due = due(step, config.train.reconstruct_every, total) and not vote.stop_signal
            if workers.rank == 0 and drawing_due:
                draw_reconstructions(run, step, console)
            report.pause_ended(paused)

            # stop if signalled
            if step >= total or vote.stop_signal:
                break

            # fetch and step
            began = time.perf_counter()
            run.optimizer.lr.fill_(schedule(step))
            output = None
            for _ in range(run.split.accumulation):
                output = run.train_step(*next(stream))
            assert output is not None
            step += 1
            log.record(step, output)
            pacer.wait()
            report.step_done(step)
            if step == run.first_step + 1:
                pacer.drain()
                report.first_step(time.perf_counter() - began, time.time() - started)
                shorten_timeouts(workers, config.runtime)
                metrics.phase("training")

            # log if due; the values arrive one step later, when the next step is already under way
            log.settle()
            if due(step, config.train.log_every, total):
                log.mark(step)

            # save if due
            if (written := saver.poll()) is not None:
                report.saved(written)
            overdue = minutes is not None and time.monotonic() - saved_at >= minutes * 60
            vote.cast(stop.number, save=workers.rank == 0 and (overdue or postponed) and not saver.busy)
            if due(step, config.checkpoint.every_steps, total) or vote.save_wanted:
                vote.saved()
                log.flush()
                # While rank 0's disk is behind, training does not wait: the vote brings this back.
                postponed = saver.busy and step < total
                if not postponed:
                    save(run, saver, step, log)
                    saved_at = time.monotonic()

        # leave with a checkpoint, complete or not
        metrics.phase("saving")
        log.flush()
        if step > run.first_step and saver.step != step:
            save(run, saver, step, log)
        written = saver.wait()
        stored = written is None or report.saved(written)
        if step < total:
            lost = "" if stored else "; its checkpoint could not be written, an older one is there"
            reason = f"stopped by {signal_name(vote.stop_signal)} after step {step}{lost}"
            return Outcome("stopped", step, reason)
        # Only rank 0 knows whether its disk took the checkpoint; no node may call the run finished without it.
        (stored_by_first,) = workers.from_first([int(stored)])
        for delay in LAST_SAVE_DELAYS:
            if stored_by_first or stop_anywhere(workers, stop):
                break
            console.warn(f"trying again in {delay:g} s, since nothing else holds the last steps")
            if stopped_within(delay, workers, stop):
                break
            save(run, saver, step, log)
            written = saver.wait()
            (stored_by_first,) = workers.from_first([int(written is None or report.saved(written))])
        if not stored_by_first:
            # Not a failure that a restart cures: it would train the last steps again, only to end here.
            raise TrainingError(
                f"training is complete, but its last checkpoint could not be written to {run.checkpoints}"
                f"{room(run.checkpoints, saver.size)};\n"
                "make room and run the same command again: it goes on from the checkpoint before"
            )
        return Outcome("finished", step)


def room(folder: Path, size: int) -> str:
    """What a checkpoint of `size` bytes needs and what is free, as an apposition; empty where that is unknown."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f", which needs {size / 1e6:.3g} MB and has {free / 1e6:.3g} MB free" if size > free else ""


def due(step: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps (0: never) and at the end happens after `step`."""
    return step > 0 and (step >= total or (every > 0 and step % every == 0))


def stop_anywhere(workers: Workers, stop: StopRequest) -> bool:
    """Whether any rank has received a stop signal; all ranks ask together."""
    return any(number for (number,) in workers.gather([stop.number]))


def stopped_within(seconds: float, workers: Workers, stop: StopRequest) -> bool:
    """Waits on all ranks together; True, at once, when any of them receives a stop signal.

    In slices: time.sleep goes on after a signal that is handled, a rank inside a collective hears none, and none may
    stay away from the others for the collective timeout.
    """
    slices = math.ceil(seconds / WAIT_SLICE_SECONDS)
    for _ in range(slices):
        time.sleep(seconds / slices)
        if stop_anywhere(workers, stop):
            return True
    return False


def save(run: Run, saver: Saver, step: int, log: StepLog) -> None:
    """Starts to write a checkpoint after `step`, on rank 0: what it holds is the same on all ranks."""
    if run.workers.rank == 0:
        meta = checkpoint_meta(run.config, step) | {"losses_since_log": log.losses}
        saver.start(step, checkpoint_tensors(run.optimizer), meta)


def draw_reconstructions(run: Run, step: int, console: Console) -> None:
    """Draws held-out pictures, masked and reconstructed, unless those of this step are there already."""
    path = picture_path(run.directory, step)
    if run.val_data is None or path.exists():
        return
    try:
        draw_held_out(run.train_step.model, run.val_data, path, run.config)
        console.say(f"held-out samples, original, masked and reconstructed: {path}")
    except UserError as error:
        console.warn(str(error))


class Pacer:
    """Keeps the host at most STEPS_AHEAD optimizer steps ahead of a GPU; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Marks the step just enqueued and waits for the one STEPS_AHEAD before it."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        if len(self._events) > STEPS_AHEAD:
            self._events.popleft().synchronize()

    def drain(self) -> None:
        """Waits for all enqueued steps."""
        while self._events:
            self._events.popleft().synchronize()
