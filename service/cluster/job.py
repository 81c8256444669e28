"""What a scheduler is asked to run, whichever scheduler it is: made from a configuration alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.cluster import presets
from service.config.checks import check_world
from service.config.cluster import ClusterSection
from service.config.load import dump_config
from service.config.schema import RunConfig
from service.errors import UserError


@dataclass(frozen=True)
class Job:
    """One run on `cluster.nodes` nodes.

    `name` is the scheduler's label, without control characters. `seeds`: one run for each (Slurm).
    `after`: id of a job that has to succeed first (Slurm).
    """

    name: str
    config: RunConfig
    seeds: tuple[int, ...] = ()
    after: str | None = None

    @property
    def cluster(self) -> ClusterSection:
        """Where it runs."""
        return self.config.cluster

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return presets.gpus_per_node(self.cluster)

    @property
    def workers(self) -> int:
        """Worker processes of a node."""
        wanted = self.config.runtime.nproc_per_node
        if wanted != "auto":
            return wanted
        return 1 if self.config.runtime.device == "cpu" else max(1, self.gpus)

    @property
    def run_dir(self) -> Path:
        """Run directory as configured; relative to the working directory of the job."""
        return self.config.run.directory


def make_job(
    config: RunConfig,
    *,
    nodes: int | None = None,
    name: str | None = None,
    seeds: tuple[int, ...] = (),
    after: str | None = None,
) -> Job:
    """Check what the scheduler would only find out hours later, and describe the job.

    Raises UserError: a global batch that the ranks cannot share, too little time to save, repeated seeds.
    """
    if nodes is not None:
        if nodes < 1:
            raise UserError(f"--nodes: {nodes} is not a whole number above 0")
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": nodes})})
    job = Job(label(name or config.run.name), config, seeds, after)
    check_world(config, config.cluster.nodes * job.workers)
    if config.runtime.device == "cuda" and job.gpus == 0:
        raise UserError("cluster.gpus_per_node: 0 although runtime.device is cuda; ask for GPUs or use cpu")
    if len(set(seeds)) != len(seeds) or any(seed < 0 for seed in seeds):
        raise UserError("--seeds: give different whole numbers, e.g. 0,1,2")
    return job


def label(name: str) -> str:
    """A job's name for a scheduler, whose tools print it on one line: control characters become spaces."""
    text = re.sub(r"[\x00-\x1f\x7f]+", " ", name).strip()
    if not text:
        raise UserError("--name: the name of a job is empty")
    return text


def run_yaml(config: RunConfig, **changes: dict[str, Any]) -> str:
    """The resolved run for the nodes, with the fields of some sections replaced.

    Without the cluster section: it is used up by the renderer, and its variables may hold secrets.
    """
    updates: dict[str, Any] = {
        section: getattr(config, section).model_copy(update=values) for section, values in changes.items()
    }
    text = dump_config(config.model_copy(update={**updates, "cluster": ClusterSection()}))
    return text[: text.index("\ncluster:\n") + 1]
