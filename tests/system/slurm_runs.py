"""What the tests on Slurm submit: a tiny run of 2 nodes x 2 processes over gloo, from a directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.system.slurm_host import completed
from tests.system.slurm_lab import SlurmLab

HOSTILE = 'it\'s "a" $HOME `id` \\ %j #1, 2;\n second'
STEPS = 100
TINY = {
    "model.input_size": "32,32",
    "model.mask_unit_size": "2,2",
    "model.stages": "1,1",
    "model.q_pool": "1",
    "model.mask_unit_attn": "true,false",
    "model.embed_dim": "16",
    "model.decoder_embed_dim": "32",
    "model.decoder_depth": "1",
    "model.decoder_num_heads": "2",
    "data.kind": "synthetic",
    "data.synthetic_samples": "300",
    "data.threads": "1",
    "optim.lr": "1e-3",
    "optim.warmup_steps": "10",
    "train.global_batch": "8",
    "train.steps": str(STEPS),
    "train.log_every": "10",
    "checkpoint.every_steps": "20",
    "runtime.device": "cpu",
    "runtime.nproc_per_node": "2",
    "runtime.threads": "1",
    "runtime.grace_seconds": "30",
    "metrics.port": "0",
    "cluster.nodes": "2",
    "cluster.gpus_per_node": "0",
    "cluster.slurm.exclusive": "false",
    "cluster.slurm.cpus_per_task": "2",
    "cluster.slurm.mem": "1G",
    "cluster.slurm.time": "10",
    "cluster.slurm.signal_seconds": "60",
    "cluster.slurm.venv": sys.prefix,
}


class Place:
    """A directory to submit from, on the cluster `lab`."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        directory.mkdir(exist_ok=True)
        self.environment = {**lab.environment, "XDG_STATE_HOME": str(lab.directory / "home")}

    def hiera(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """hiera-train with these arguments, here."""
        done = completed(hiera_train(*arguments), self.directory, self.environment)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def arguments(self, settings: dict[str, str] | None = None) -> list[str]:
        """The tiny run with other settings as arguments; its cache goes with the cluster."""
        merged = {**TINY, "runtime.cache_dir": str(self.lab.directory / "cache"), **(settings or {})}
        sets = [word for name, value in merged.items() for word in ("--set", f"{name}={value}")]
        # Every default is overridden; base only names a file.
        return ["--config", "base", *sets]

    def submit(self, settings: dict[str, str] | None = None, *more: str) -> str:
        """Submit the tiny run with other settings; returns the handle."""
        done = self.hiera("submit", "--on", "slurm", *more, *self.arguments(settings))
        handle = done.stdout.strip()
        assert re.fullmatch(r"hiera_slurm://hiera-train/\d+", handle), done.stdout
        return handle

    def log(self, job: str, name: str = "node-0.log") -> str:
        """A log of a job, empty while there is none."""
        path = self.directory / "logs" / job / name
        return path.read_text(errors="replace") if path.exists() else ""


def hiera_train(*arguments: str) -> list[str]:
    """The command line of hiera-train in this interpreter."""
    code = "import sys; from service.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *arguments]


def job_of(handle: str) -> str:
    """Id of the job of a handle."""
    return handle.rsplit("/", 1)[-1]
