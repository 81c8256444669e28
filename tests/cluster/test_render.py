"""`hiera-train render`: without torch, torchx or a network, and quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.cli import main
from service.cluster import kubernetes, slurm
from service.errors import EXIT_CONFIG
from tests.cluster.golden import job

BLOCKED = """
import sys, socket
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "torchx", "kubernetes", "triton", "prometheus_client"}:
            raise ImportError(name + " is not to be imported")
sys.meta_path.insert(0, Block())
def no_network(*arguments, **options):
    raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = no_network
from service.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_render_prints_the_renderers_text(capsys, scheduler):
    assert main(["render", scheduler, "--config", "base", "--nodes", "4"]) == 0
    renderer = {"slurm": slurm, "kubernetes": kubernetes}[scheduler]
    assert capsys.readouterr().out == renderer.render(job({"nodes": 4}, ()))


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_render_needs_neither_torch_nor_torchx_nor_a_network(scheduler):
    command = [sys.executable, "-c", BLOCKED, "render", scheduler, "--config", "base", "--nodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "hiera-base" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm"], "--config is missing"),
        (["slurm", "--config", "base", "--seeds", "1,x"], "--seeds: '1,x' is not a list of whole numbers"),
        (["slurm", "--config", "base", "--after", "job"], "--after: 'job' is neither the id of a Slurm job"),
        (["slurm", "--config", "base", "--nodes", "5"], "train.global_batch: 4096 does not divide by 40 ranks"),
        (["kubernetes", "--config", "base", "--seeds", "1"], "--seeds and --after: only Slurm"),
        (["condor", "--config", "base"], "argument slurm|kubernetes: invalid choice: 'condor'"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert main(["render", *arguments]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith(f"hiera-train: error: {message}")
    assert error.count("\n") == 1


def test_a_handle_names_the_job_to_wait_for(capsys):
    handle = "hiera_slurm://hiera-train/17_2"
    assert main(["render", "slurm", "--config", "base", "--after", handle]) == 0
    assert "#SBATCH --dependency=afterok:17_2\n" in capsys.readouterr().out
