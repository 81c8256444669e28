"""A job as torchx's AppDef, and back.

The AppDef's command is what torchx's local schedulers run; ours find the job itself in the role's metadata
and render it. An AppDef is built anew for each call: torchx changes what it is given.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchx.specs as specs

from service.cluster import kubernetes, presets
from service.cluster.job import Job
from service.config import yamlfile
from service.config.load import dump_config
from service.config.schema import RunConfig
from service.config.shipped import find_config
from service.errors import UserError
from service.launch.rendezvous import job_port

ROLE = "trainer"
METADATA = "hiera_train"
"""Key of a role's metadata under which our schedulers find the job."""


def make_app(job: Job, source: str, overrides: tuple[str, ...]) -> specs.AppDef:
    """A new AppDef of a job. Its command is what torchx's own local schedulers run."""
    arguments = ["run", "--config", str(Path(find_config(source)).absolute())]
    for override in overrides:
        arguments += ["--set", override]
    nodes = job.cluster.nodes
    if nodes > 1:
        # On one machine the "nodes" meet at home; ours and torchx's other schedulers do not use it.
        endpoint = f"localhost:{job_port(job.name)}"
        arguments += ["--nnodes", str(nodes), "--rdzv-endpoint", endpoint]
    # torchx replaces ${…} in arguments, and $$ by $.
    arguments = [argument.replace("$", "$$") for argument in arguments]
    if nodes > 1:
        arguments += ["--node-rank", specs.macros.replica_id]
    role = specs.Role(
        name=ROLE,
        image=job.cluster.image or kubernetes.IMAGE,
        entrypoint=command(),
        args=arguments,
        env={name: value.replace("$", "$$") for name, value in presets.environment(job.cluster).items()},
        num_replicas=nodes,
        resource=specs.Resource(cpu=-1, gpu=job.gpus, memMB=-1),
        metadata={METADATA: Payload.of(job).as_dict()},
    )
    return specs.AppDef(name=kubernetes.object_name(job.name), roles=[role])


def command() -> str:
    """hiera-train beside this interpreter, which a shell's PATH may not have; else by name."""
    return shutil.which("hiera-train", path=str(Path(sys.executable).parent)) or "hiera-train"


@dataclass(frozen=True)
class Payload:
    """A job as plain values, which torchx may copy and print."""

    config: str
    name: str
    seeds: tuple[int, ...]
    after: str | None

    @staticmethod
    def of(job: Job) -> Payload:
        """The payload of a job."""
        return Payload(dump_config(job.config), job.name, job.seeds, job.after)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"config": self.config, "name": self.name, "seeds": list(self.seeds), "after": self.after}


def job_of(app: specs.AppDef, slurm: dict[str, Any] | None = None) -> Job:
    """The job that an AppDef of make_app carries, with fields of cluster.slurm replaced.

    Raises UserError when another component made it.
    """
    payload = app.roles[0].metadata.get(METADATA) if len(app.roles) == 1 else None
    if payload is None:
        raise UserError(f"{app.name}: this scheduler runs hiera-train's component only (hiera.train)")
    config = RunConfig.model_validate(yamlfile.parse(payload["config"], app.name).data)
    if slurm:
        section = type(config.cluster.slurm).model_validate({**dict(config.cluster.slurm), **slurm})
        cluster = config.cluster.model_copy(update={"slurm": section})
        config = config.model_copy(update={"cluster": cluster})
    return Job(payload["name"], config, tuple(payload["seeds"]), payload["after"])
