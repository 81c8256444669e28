"""The one table of metrics: workers, endpoint, monitoring/METRICS.md and the tests all read it.

`python -m service.metrics.names` prints monitoring/METRICS.md. Names are written without the prefix `hiera_`
here and in the workers' datagrams. Base units only: seconds, bytes, ratios. Labels are bounded: `node` is the
rank of the node, `local_rank` the worker on it; `local_rank` is there only where workers of a node differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "hiera_"

Kind = Literal["counter", "gauge", "histogram", "info"]
Source = Literal["worker", "launcher"]

STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CHECKPOINT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

NODE = ("node",)
WORKER = ("node", "local_rank")


@dataclass(frozen=True)
class Metric:
    """One row: `labels` start with `node`; `source` says who writes it; `buckets` are a histogram's."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = NODE
    source: Source = "worker"
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Name as Prometheus shows it."""
        return PREFIX + self.name


METRICS: tuple[Metric, ...] = (
    # Progress
    Metric(
        "samples_total",
        "counter",
        "samples",
        "Samples trained on by the workers of this node; sum over nodes.",
    ),
    Metric("samples_per_second", "gauge", "samples/s", "Training throughput of the whole run, by global rank 0."),
    Metric("step", "gauge", "steps", "Optimizer steps done since the run began, resumed ones included."),
    Metric("epoch", "gauge", "epochs", "Epochs of the training data done, with the fraction of the current one."),
    Metric("progress_ratio", "gauge", "ratio", "Share of the run that is done, 0 to 1."),
    Metric("eta_seconds", "gauge", "seconds", "Estimated time to the end of the run."),
    Metric(
        "last_step_timestamp_seconds",
        "gauge",
        "seconds",
        "Unix time at which the step of this node last advanced; 0 before the first.",
        source="launcher",
    ),
    # Time of a step
    Metric(
        "step_seconds",
        "histogram",
        "seconds",
        "Wall time of an optimizer step.",
        WORKER,
        buckets=STEP_BUCKETS,
    ),
    Metric("data_wait_seconds_total", "counter", "seconds", "Time the training loop waited for data.", WORKER),
    Metric("mfu_ratio", "gauge", "ratio", "Model FLOP/s over the peak of the GPU, 0 to 1.", WORKER),
    # Learning
    Metric("loss", "gauge", "1", "Training loss, mean over the global batch (global rank 0)."),
    Metric("validation_loss", "gauge", "1", "Loss on the held-out split with fixed masks (global rank 0)."),
    Metric("learning_rate", "gauge", "1", "Learning rate of the last step."),
    Metric("grad_norm", "gauge", "1", "Global gradient norm before clipping."),
    Metric("nonfinite_total", "counter", "steps", "Steps whose loss or gradient was not finite."),
    # Memory
    Metric("memory_allocated_bytes", "gauge", "bytes", "GPU memory held by tensors.", WORKER),
    Metric("memory_reserved_bytes", "gauge", "bytes", "GPU memory held by the caching allocator.", WORKER),
    Metric("memory_peak_bytes", "gauge", "bytes", "Peak of GPU memory held by tensors.", WORKER),
    # Start-up
    Metric("compile_seconds", "gauge", "seconds", "Time spent compiling and capturing since the start.", WORKER),
    Metric(
        "compile_cache_hits_total",
        "counter",
        "1",
        "Compiled artefacts found in the persistent caches.",
        WORKER,
    ),
    Metric("compile_cache_misses_total", "counter", "1", "Compiled artefacts that had to be made.", WORKER),
    Metric(
        "time_to_first_step_seconds",
        "gauge",
        "seconds",
        "Start of the launcher to the end of the first step.",
    ),
    # Checkpoints
    Metric(
        "checkpoint_seconds",
        "histogram",
        "seconds",
        "Time from the copy on the device to a whole checkpoint on disk.",
        buckets=CHECKPOINT_BUCKETS,
    ),
    Metric("checkpoint_failures_total", "counter", "1", "Checkpoints that could not be written."),
    Metric("last_checkpoint_step", "gauge", "steps", "Step of the newest whole checkpoint."),
    Metric("last_checkpoint_timestamp_seconds", "gauge", "seconds", "Unix time of the newest whole checkpoint."),
    # Trouble
    Metric("bad_files_total", "counter", "files", "Unreadable files that were skipped."),
    Metric(
        "restarts_total",
        "counter",
        "1",
        "Times that the workers of this node were started again after a failure.",
        source="launcher",
    ),
    Metric(
        "healthy",
        "gauge",
        "1",
        "1 while the node starts, compiles or trains; 0 when stuck.",
        source="launcher",
    ),
    Metric("datagrams_total", "counter", "1", "Datagrams received from workers.", source="launcher"),
    Metric(
        "datagrams_malformed_total",
        "counter",
        "1",
        "Datagrams, or values in them, that were ignored.",
        source="launcher",
    ),
    # Identity
    Metric(
        "build_info",
        "info",
        "1",
        "Versions: version, torch, triton, python.",
        ("node", "version", "torch", "triton", "python"),
        source="launcher",
    ),
    Metric(
        "run_info",
        "info",
        "1",
        "The run: name, nodes, workers on this node, global batch, device.",
        ("node", "run", "nodes", "workers", "global_batch", "gpu"),
        source="launcher",
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def markdown() -> str:
    """monitoring/METRICS.md as text."""
    lines = [
        "# Metrics",
        "",
        "One endpoint a node, `http://<node>:9400/metrics` (`metrics.host`, `metrics.port`); `/healthz`.",
        "Counters survive restarts of the workers and begin at 0 with each start of the launcher.",
        "`node` is the rank of the node, `local_rank` the worker on it.",
        "",
        "Generated: `python -m service.metrics.names > monitoring/METRICS.md`.",
        "",
        "| metric | type | unit | labels | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        kind = "gauge (always 1)" if metric.kind == "info" else metric.kind
        lines.append(f"| `{metric.full_name}` | {kind} | {metric.unit} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
