"""The command line as a user meets it: real processes for what starts it, in-process for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import yaml

from service.cli import main
from service.config.load import load_config
from service.config.shipped import shipped_configs
from service.errors import EXIT_CONFIG, TrainingError

SYNTHETIC = ["--config", "tiny", "--set", "data.kind=synthetic"]


def process(*arguments: str, code: str | None = None, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "service"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def error(capsys, *arguments: str) -> str:
    assert main(arguments) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture
def stub(monkeypatch):
    """Stands for a module that another part of the service brings, and records how it is called."""

    def _stub(name: str, function: str, result):
        calls = []

        def record(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        module = ModuleType(name)
        setattr(module, function, record)
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return _stub


HEAVY = "torch numpy triton hiera PIL prometheus_client hiera_optim"
LISTED = (
    "import sys; from service.cli import main\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as leave: code = leave.code\n"
    f"print(code, *(name for name in {HEAVY.split()!r} if name in sys.modules), file=sys.stderr)"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["config", "check", "tiny", "--set", "data.kind=synthetic"],
        ["config", "show", "huge"],
        ["config", "schema"],
        [*SYNTHETIC, "--dry-run", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1"],
    ],
)
def test_nothing_heavy_is_imported(arguments):
    done = process(*arguments, code=LISTED)
    assert done.stderr == "0\n"
    assert done.stdout


def test_array_headers_are_read_without_numpy(tmp_path):
    import numpy

    numpy.save(tmp_path / "x.npy", numpy.zeros((2, 8, 1024), "f4"))
    done = process("config", "check", "eeg-1d", "--set", f"data.path={tmp_path}/x.npy", code=LISTED)
    assert done.stderr == "0\n"


def test_a_mistake_is_one_line_on_stderr_and_the_documented_code():
    done = process("--config", "base", "--dry-run", "--set", "model.input_size=472,472")
    assert done.returncode == EXIT_CONFIG
    assert done.stdout == ""
    assert done.stderr == (
        "hiera-train: error: model.input_size: [472, 472] does not divide by [32, 32] "
        "(patch_stride x q_stride^3); nearest valid: 472 -> 448 or 480\n"
    )


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "service", "config", "schema"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 0


def test_a_full_disk_under_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "service", "config", "schema"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.stderr == b"hiera-train: error: standard output: No space left on device\n"
    assert done.returncode == 1


def test_closed_stdout_is_no_error():
    done = subprocess.run(
        [sys.executable, "-m", "service", "config", "show", "base"],
        stderr=subprocess.PIPE,
        check=False,
        preexec_fn=lambda: os.close(1),
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_show_is_the_whole_configuration(capsys):
    assert main(["config", "show", "huge", "--set", "train.steps=3"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == load_config("huge", ["train.steps=3"]).model_dump(mode="json")


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) >= {"run", "model", "data"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "check", "tiny"],
        ["config", "check", "--config", "tiny"],
        ["--config", "tiny", "--dry-run"],
        ["run", "--config", "tiny", "--dry-run"],
    ],
)
def test_check_and_dry_run_say_what_would_run(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = [
        "--set",
        "data.kind=synthetic",
        "--set",
        "runtime.nproc_per_node=2",
        "--set",
        "train.micro_batch=256",
    ]
    assert main([*arguments, *more]) == 0
    assert capsys.readouterr().out == (
        "run:    hiera-tiny in runs/hiera-tiny\n"
        "model:  55.0 M parameters, input 3 x 224 x 224\n"
        "        56 x 56 = 3136 tokens, 19 of 49 mask units kept\n"
        "data:   synthetic\n"
        "optim:  adamw, peak learning rate 0.0008, warm-up 40 epochs\n"
        "train:  400 epochs, global batch 4096, 2 ranks x 8 micro-batches of 256\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--config is missing, e.g. hiera-train --config quickstart (see hiera-train --help)"),
        (["run"], f"--config is missing; shipped configurations: {', '.join(shipped_configs())}"),
        (["config", "show"], f"--config is missing; shipped configurations: {', '.join(shipped_configs())}"),
        (["confg"], "unknown command confg; did you mean config?"),
        (["base", "--dry-run"], "unknown command base; to train with this configuration: hiera-train --config base"),
        (["my.yaml"], "unknown command my.yaml; to train with this configuration: hiera-train --config my.yaml"),
        (
            ["zzz"],
            "unknown command zzz; "
            "commands: run, config, reconstruct, export, render, submit, status, logs, list, cancel",
        ),
        (
            ["config", "show", "base", "--config", "tiny"],
            "two configurations: base and --config tiny; give one",
        ),
        (["--config"], "argument --config: expected one argument (see hiera-train run --help)"),
        ([*SYNTHETIC, "--foo"], "unknown option --foo (see hiera-train run --help)"),
        (["--conifg", "tiny"], "unknown option --conifg; did you mean --config?"),
        ([*SYNTHETIC, "--node_rank=1"], "unknown option --node_rank; did you mean --node-rank?"),
        (["config", "show", "tiny", "--st", "train.steps=3"], "unknown option --st; did you mean --set?"),
        (["reconstruct", "/", "-step", "3"], "unknown option -step; did you mean --step?"),
        (["export", "/", "--ot", "x.pth"], "unknown option --ot; did you mean --to?"),
        (["config", "shwo"], "argument COMMAND: unknown: shwo; did you mean show? (see hiera-train config --help)"),
        (
            ["render", "slrum", "--config", "tiny"],
            "argument slurm|kubernetes: unknown: slrum; did you mean slurm? (see hiera-train render --help)",
        ),
        (["run", "tiny"], "unrecognized arguments: tiny (see hiera-train --help)"),
        (
            [*SYNTHETIC, "--nnodes", "x"],
            "argument --nnodes: invalid int value: 'x' (see hiera-train run --help)",
        ),
        ([*SYNTHETIC, "--nnodes", "2"], "2 nodes but no node rank: give --node-rank or HIERA_NODE_RANK"),
        (
            [*SYNTHETIC, "--set", "runtime.nproc_per_node=3"],
            "train.global_batch: 4096 does not divide by 3 ranks; nearest valid: 4095 or 4098",
        ),
        (
            [*SYNTHETIC, "--dry-run", "--set", "train.global_batch=10", "--set", "train.micro_batch=4"],
            "train.global_batch: 10 does not divide by 1 rank x micro_batch 4 = 4; nearest valid: 8 or 12",
        ),
        (
            ["--config", "tiny"],
            "data.path: null, but data.kind images needs a folder of pictures; add --set data.path=...",
        ),
        (["config", "check", "tiny", "--set", "data.path=/no/such"], "data.path: /no/such does not exist"),
        (
            ["reconstruct", "/no/such"],
            "/no/such is not a directory; give a run directory, e.g. runs/quickstart",
        ),
        (["reconstruct", "/"], "/ is not a run directory: it has no run.yaml"),
        (["export", "/", "--to", "x.pth"], "/ is not a run directory: it has no run.yaml"),
        (["export", "/"], "the following arguments are required: --to (see hiera-train export --help)"),
    ],
)
def test_mistakes(arguments, line, capsys, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("HIERA_", "SLURM_")):
            monkeypatch.delenv(name)
    assert error(capsys, *arguments) == f"hiera-train: error: {line}\n"


def test_run_hands_the_configuration_to_the_launcher(stub):
    calls = stub("service.launch.launcher", "run", 75)
    nodes = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29400"]
    assert main([*SYNTHETIC, *nodes]) == 75
    expected = load_config("tiny", ["data.kind=synthetic"])
    assert calls == [((expected,), {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "node0:29400"})]
    assert main(SYNTHETIC) == 75
    assert calls[1] == ((expected,), {"nnodes": 1, "node_rank": None, "rdzv_endpoint": None})


def test_nodes_from_the_environment_count_for_the_batch(stub, monkeypatch, capsys):
    stub("service.launch.launcher", "run", 0)
    for name, value in (("HIERA_NNODES", "3"), ("HIERA_NODE_RANK", "0"), ("HIERA_RDZV_ENDPOINT", "a:1")):
        monkeypatch.setenv(name, value)
    line = error(capsys, *SYNTHETIC, "--set", "runtime.nproc_per_node=1")
    assert "4096 does not divide by 3 ranks" in line


def test_errors_of_the_launcher_keep_their_code(stub, capsys):
    stub("service.launch.launcher", "run", TrainingError("loss is not finite at step 3"))
    assert main(SYNTHETIC) == 70
    assert capsys.readouterr().err == "hiera-train: error: loss is not finite at step 3\n"


def test_an_interrupt_has_no_traceback(stub, capsys):
    stub("service.launch.launcher", "run", KeyboardInterrupt())
    assert main(SYNTHETIC) == 130
    assert capsys.readouterr().err == "hiera-train: interrupted\n"


def test_reconstruct_and_export_are_handed_over(stub, tmp_path, capsys):
    (tmp_path / "run.yaml").touch()
    drawn = stub("service.train.reconstruct", "main", 0)
    assert main(["reconstruct", str(tmp_path), "--step", "5"]) == 0
    assert drawn == [((tmp_path,), {"step": 5})]
    exported = stub("service.train.export", "main", 0)
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "w.pth")]) == 0
    assert exported == [((tmp_path, tmp_path / "w.pth", None), {})]
    assert error(capsys, "export", str(tmp_path), "--to", "w.bin") == (
        "hiera-train: error: --to: w.bin must end in .pth or .safetensors\n"
    )
    assert error(capsys, "export", str(tmp_path), "--to", "/no/such/w.pth") == (
        "hiera-train: error: --to: the directory /no/such does not exist\n"
    )
