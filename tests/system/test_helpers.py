"""What the tests here are made of, without the machines that they need: nothing outlives them or is left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.system.slurm_host import end
from tests.system.slurm_runs import Place
from tests.system.test_docker_play import Engine
from tests.system.test_prometheus import Prometheus

ROOT = Path(__file__).parents[2]
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def start(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


def test_a_process_that_does_not_end_when_asked_is_killed_and_said():
    with start(STUBBORN) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            end(process, 0.2)
        assert process.returncode == -9


def test_a_process_that_ends_when_asked_is_waited_for():
    with start('print("up", flush=True); import time; time.sleep(600)') as process:
        end(process)
        assert process.returncode == -15


def bare(kind, **fields):
    """An object of a class without the programs that it would start."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


def test_an_engine_removes_what_was_submitted_through_it_and_nothing_else(tmp_path):
    calls = []
    process = start('print("up", flush=True); import time; time.sleep(600)')
    engine = bare(
        Engine,
        handles=[],
        networks=["torchx"],
        process=process,
        socket=tmp_path / "socket",
        podman=lambda *words: calls.append(words),
    )
    handles = ["local_docker://hiera-train/mine", "local_docker://hiera-train/somebody-s"]
    listed = "".join(f"RUNNING    {handle}\n" for handle in handles)
    engine.hiera = lambda *words: SimpleNamespace(
        returncode=0, stderr="", stdout=handles[0] + "\n" if words[0] == "submit" else listed
    )
    assert engine.submit() == handles[0]
    engine.close()
    assert calls == [("rm", "--force", "mine-trainer-0")]
    assert process.poll() is not None
    process.stdout.close()


class Busy(BaseHTTPRequestHandler):
    """The first request is cut off, the second answered with 503; a query `wrong` is refused."""

    requests = 0

    def do_GET(self):
        Busy.requests += 1
        if Busy.requests == 1:
            self.connection.close()
            return
        code = 503 if Busy.requests == 2 else 400 if "wrong" in self.path else 200
        # A query has no sample at first.
        result = '[{"value": [0, "7"]}]' if Busy.requests > 3 else "[]"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(f'{{"data": {{"result": {result}}}}}'.encode())

    def log_message(self, *_):
        pass


def test_prometheus_is_asked_again_while_it_is_busy(monkeypatch):
    monkeypatch.setattr(Busy, "requests", 0)
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        server.handle_error = lambda *_: None
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            process = SimpleNamespace(poll=lambda: None)
            prometheus = bare(Prometheus, url=f"http://127.0.0.1:{server.server_port}", process=process)
            assert prometheus.value("hiera_step") == 7
            assert Busy.requests == 4
            assert prometheus.get("query", query="wrong") is None
        finally:
            server.shutdown()
            thread.join()


def test_a_run_on_slurm_keeps_its_cache_with_the_cluster(tmp_path):
    lab = SimpleNamespace(directory=tmp_path, environment={})
    arguments = Place(lab, tmp_path / "place").arguments({"train.steps": "3"})
    assert f"runtime.cache_dir={tmp_path}/cache" in arguments
    assert [word for word in arguments if word.startswith("train.steps=")] == ["train.steps=3"]


@pytest.mark.parametrize(("machine", "there"), [("x86_64", True), ("aarch64", False)])
def test_kubectl_is_asked_only_where_its_package_runs(machine, there):
    code = (
        f"import platform, sys; platform.machine = lambda: {machine!r}\n"
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, "tests/system/test_cluster_tools.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_all_that_is_asked_of_torchx" in done.stdout
    assert ("test_kubectl_makes" in done.stdout) is there
