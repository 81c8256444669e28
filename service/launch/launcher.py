"""The launcher: one a node, parent of torchrun, owner of everything that must outlive a worker.

Who restarts what. A worker that dies is started again by torchrun (--max-restarts), not by the launcher:
torchrun's agents of all nodes agree through their rendezvous store, so a crash on one node makes all nodes
start a new round within a second, where separate launchers would find out through a collective's time-out.
torchrun restarts after any non-zero exit, though, also where that is wrong (stopped, wrong input, non-finite
loss); service.launch.worker, which is what torchrun starts, refuses to train when the state file of this
attempt already has the outcome. Only torchrun's own death (kill -9, a lost store) is the launcher's to cure,
from the same budget. A final failure that one node alone knows of reaches the others through the state files
in the shared run directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from prometheus_client import CollectorRegistry

from service import streams
from service.config.checks import check_world
from service.config.schema import RunConfig
from service.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_UNRECOVERABLE
from service.launch import environment as environments
from service.launch import hardware, network, processes, rundir, seeding
from service.launch.agent import EXIT_AGENT_FAILED, describe_exit
from service.launch.caches import count_entries
from service.launch.rendezvous import Rendezvous, is_loopback, preflight, resolve, route_address
from service.launch.state import (
    ATTEMPT_VARIABLE,
    NODE_RANK_VARIABLE,
    RUN_DIR_VARIABLE,
    State,
    read_state,
    write_state,
)
from service.launch.stopping import StopSignals
from service.launch.torchrun import Torchrun
from service.launch.worker import NNODES_VARIABLE, STARTED_VARIABLE, STOP_FILE_VARIABLE
from service.metrics.client import SOCKET_VARIABLE
from service.metrics.exporter import Exporter

WORKER_MODULE = "service.train"
POLL_SECONDS = 0.5
RESEND_SECONDS = 2.0
"""A signal may meet a worker that has no handlers yet; handlers are idempotent, so it is sent again."""
LEAVE_SECONDS = 10.0
"""What workers and torchrun get to leave by themselves once nothing of value can come from them."""
RENDEZVOUS_SECONDS = 300.0
RENDEZVOUS_VARIABLE = "HIERA_RDZV_TIMEOUT"
_FOREIGN_VARIABLES = ("PET_", "TORCHELASTIC_", "TORCHRUN_")
"""Prefixes of what an outer torchrun or operator left: torchrun would take PET_* for flags of its own."""


def say(text: str) -> None:
    """A line for the user."""
    streams.say(f"hiera-train: {text}")


def run(
    config: RunConfig,
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    worker_module: str = WORKER_MODULE,
) -> int:
    """Run the configuration on this node until it ends; returns the exit code (service.errors).

    Several nodes: call it on each, with flags or environment as service.launch.rendezvous.resolve says.
    Call it from the main thread, which gets the signals. `worker_module` is what each rank runs; tests
    put a small one there. Raises UserError for what is wrong before anything is started.
    """
    rendezvous = resolve(nnodes, node_rank, rdzv_endpoint, os.environ)
    nodes, rank = (1, 0) if rendezvous is None else (rendezvous.nnodes, rendezvous.node_rank)
    facts, notes = environments.inspect_node(config, os.environ)
    check_world(config, facts.workers * nodes)
    directory = config.run.directory.absolute()
    rundir.make_run_directory(directory)
    with rundir.locked(directory, nodes, rank):
        rundir.bind_config(directory, config)
        seeds = config.runtime.cache_seed
        if seeds is not None and (note := seeding.unpack(seeds, facts.cache)):
            notes.append(note)
        with Launch(config, directory, rendezvous, facts, worker_module) as launch:
            code = launch.supervise(notes)
            # Here, where stop signals are heard: a large cache takes a while.
            if seeds is not None and rank == 0 and code == EXIT_FINISHED:
                note = seeding.pack(seeds, facts.cache, stopped=lambda: launch.stopping)
                if note is not None:
                    say(note)
        return code


class Launch:
    """One start of a run on this node: a context that leaves no process, file or handler behind."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        rendezvous: Rendezvous | None,
        facts: environments.NodeFacts,
        worker_module: str = WORKER_MODULE,
    ) -> None:
        self.config, self.directory, self.rendezvous, self.facts = config, directory, rendezvous, facts
        self.worker_module = worker_module
        self.nnodes, self.rank = (1, 0) if rendezvous is None else (rendezvous.nnodes, rendezvous.node_rank)
        self.attempt = secrets.token_hex(8)
        self.started = time.time()
        self.worker_starts = 0
        self.killed = ""
        """Why the workers were killed; empty while they leave by themselves."""
        self._grace_exceeded = False
        self._peer_failed = False
        self._agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Launch:
        self._control = rundir.private_directory(self.directory, self.rank)
        self.stop_file = self._control / "stop"
        self.signals = StopSignals()
        self.exporter = Exporter(
            CollectorRegistry(),
            node_rank=self.rank,
            workers=self.facts.workers,
            on_start=self._workers_started,
        )
        self._children_before = set(processes.children(os.getpid()))
        processes.adopt_orphans()
        self.signals.install()
        before = read_state(self.directory, self.rank)
        self._write_state(State("running", before.step if before is not None else 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()
        self.exporter.close()
        self.signals.remove()
        shutil.rmtree(self._control, ignore_errors=True)

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for, of the launcher or of torchrun."""
        return self.signals.number != 0 or self.stop_file.exists()

    # Start

    def supervise(self, notes: Sequence[str]) -> int:
        """Start torchrun, again when it dies, and wait for the outcome; returns the exit code."""
        torchrun = self._meet()
        if torchrun is None:
            return self._finish()
        environment = self._environment(torchrun, notes)
        failures = 0
        while not self.stopping:
            left = self.config.runtime.max_restarts - max(failures, self.worker_starts - 1)
            command = torchrun.command(self.worker_module, self.directory, max(0, left))
            # A session of its own: Ctrl-C in a terminal reaches the launcher alone, which hands it on once.
            # It starts with the stop signals blocked and takes them once it can (service.launch.agent).
            old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.LAUNCHER_SIGNALS)
            try:
                self._agent = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            code = self._wait(self._agent)
            self._kill_all()
            if self.killed or self.stopping or self._outcome() is not None:
                break
            if left <= 0 or not (code < 0 or code == EXIT_AGENT_FAILED):
                break
            failures = max(failures + 1, self.worker_starts)
            delay = min(30.0, 2.0 ** (failures - 1))
            say(f"torchrun {describe_exit(code)}; starting it again in {delay:g} s, {left} restarts left")
            self._pause(delay)
        return self._finish()

    def _meet(self) -> Torchrun | None:
        """Wait for the rendezvous of several nodes; None when a stop was asked for meanwhile."""
        common = Torchrun(
            self.facts.workers, self.config.runtime.grace_seconds, self._control / "torchrun", self.attempt
        )
        if self.rendezvous is None:
            return common
        timeout = float(os.environ.get(RENDEZVOUS_VARIABLE, RENDEZVOUS_SECONDS))
        address = preflight(self.rendezvous, timeout, stopped=lambda: self.stopping, say=say)
        if self.stopping:
            return None
        local = address if self.rank == 0 else route_address(address)
        say(f"node {self.rank} of {self.nnodes}, address {local}, rendezvous {self.rendezvous.endpoint}")
        return replace(common, rendezvous=self.rendezvous, address=address, local_address=local)

    def _environment(self, torchrun: Torchrun, notes: Sequence[str]) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_VARIABLES)}
        local = torchrun.local_address
        interface = network.find_interface(
            self.nnodes, local if local is None or not is_loopback(local) else "127.0.0.1"
        )
        variables, more_notes = environments.environment(
            self.config, self.facts, base, nnodes=self.nnodes, interface=interface
        )
        for note in (*notes, *more_notes):
            say(note)
        if not self.facts.home_writable:
            Path(variables["HOME"]).mkdir(parents=True, exist_ok=True)
        variables.update(
            {
                ATTEMPT_VARIABLE: self.attempt,
                RUN_DIR_VARIABLE: str(self.directory),
                NODE_RANK_VARIABLE: str(self.rank),
                NNODES_VARIABLE: str(self.nnodes),
                STOP_FILE_VARIABLE: str(self.stop_file),
                STARTED_VARIABLE: repr(self.started),
                processes.PARENT_VARIABLE: str(os.getpid()),
            }
        )
        try:
            variables[SOCKET_VARIABLE] = str(self.exporter.open_socket(self._control))
        except OSError as error:
            base.pop(SOCKET_VARIABLE, None)
            say(f"warning: no metrics of this run, the socket cannot be made ({error.strerror})")
        self._serve_metrics()
        where = f"{self.facts.gpus[0].name} x {self.facts.workers}" if self.facts.gpus else "CPU"
        workers = f"{self.facts.workers} worker{'s' if self.facts.workers > 1 else ''}"
        say(f"{workers} on {where}, run directory {self.directory}")
        say(f"compile cache {self.facts.cache} ({count_entries(self.facts.cache)} files)")
        return {**base, **variables}

    def _serve_metrics(self) -> None:
        config = self.config
        python = ".".join(map(str, sys.version_info[:3]))
        versions = {name: hardware.package_version(name) for name in ("hiera-train", "torch", "triton")}
        self.exporter.info(
            "build_info",
            version=versions["hiera-train"],
            torch=versions["torch"],
            triton=versions["triton"],
            python=python,
        )
        self.exporter.info(
            "run_info",
            run=config.run.name,
            nodes=str(self.nnodes),
            workers=str(self.facts.workers),
            global_batch=str(config.train.global_batch),
            gpu=self.facts.gpus[0].name if self.facts.gpus else "none",
        )
        if not config.metrics.enabled:
            return
        warning = self.exporter.serve(config.metrics.host, config.metrics.port)
        say(f"warning: {warning}" if warning else f"metrics at http://{config.metrics.host}:{self.exporter.port}")

    def _workers_started(self) -> None:
        self.worker_starts += 1
        if self.worker_starts > 1:
            self.exporter.add("restarts_total")
            say(f"workers started again (restart {self.worker_starts - 1})")

    # Wait

    def _wait(self, agent: subprocess.Popen[bytes]) -> int:
        """Wait for torchrun's end, hand on stops, and cut short what will not end; returns its exit code."""
        stop_since = over_since = alone_since = 0.0
        resend = peers = 0.0
        grace = self.config.runtime.grace_seconds
        while (code := agent.poll()) is None:
            now = time.monotonic()
            workers = processes.children(agent.pid)
            alone_since = 0.0 if workers else alone_since or now
            if self.nnodes > 1 and now >= peers:
                peers = now + 2.0
                self._follow_peers()
            outcome = self._outcome()
            if outcome is not None:
                over_since = over_since or now
                limit = LEAVE_SECONDS if outcome.status == "failed" else max(grace, LEAVE_SECONDS)
                # torchrun would start its workers again, only for them to refuse: nothing to wait for.
                if now - over_since > limit or (outcome.status == "failed" and not workers):
                    self.killed = "the run was over, but its workers did not leave"
                    break
            if self.stopping:
                stop_since = stop_since or now
                if now >= resend:
                    resend = now + RESEND_SECONDS
                    self.stop_file.touch()
                    for pid in workers:
                        processes.send(pid, self.signals.number or signal.SIGTERM)
                if now - stop_since > grace:
                    self.killed = f"workers did not stop within {grace:g} s (runtime.grace_seconds)"
                    self._grace_exceeded = True
                    break
                # Not started yet, or torchrun waits for other nodes.
                if outcome is None and alone_since and now - alone_since > LEAVE_SECONDS / 5:
                    self.killed = "stopped before training began"
                    break
            processes.reap_adopted(self._children_before | {agent.pid})
            self.signals.sleep(POLL_SECONDS)
        if code is None:
            self._kill_all()
            code = agent.wait()
        return code

    def _follow_peers(self) -> None:
        """What other nodes alone know: a final failure ends this node too, a stop before training stops
        it.
        """
        for rank in range(self.nnodes):
            peer = read_state(self.directory, rank) if rank != self.rank else None
            if peer is None or peer.updated < self.started:
                continue
            if peer.status == "failed" and (peer.is_final or peer.ended):
                reason = f"node {rank}: {peer.reason}"
                if self._outcome() is None:
                    self._write_state(replace(peer, reason=reason, ended=False))
                    self._peer_failed = True
            elif peer.status == "stopped" and peer.ended and self.signals.number == 0:
                self.signals.number = signal.SIGTERM

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            self.signals.sleep(min(left, POLL_SECONDS))

    def _kill_all(self) -> None:
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()
        stay = processes.kill_marked(ATTEMPT_VARIABLE, self.attempt)
        if stay:
            say(f"warning: processes that cannot be killed: {' '.join(map(str, stay))}")

    # End

    def _state(self) -> State | None:
        now = read_state(self.directory, self.rank)
        return now if now is not None and now.attempt == self.attempt else None

    def _outcome(self) -> State | None:
        now = self._state()
        return now if now is not None and (now.is_final or self._peer_failed) else None

    def _finish(self) -> int:
        """Say how the run ended, write it down and return the exit code."""
        now = self._state() or State("running")
        if now.status == "finished":
            code = EXIT_FINISHED
            say(f"finished at step {now.step}")
        elif now.status == "stopped":
            code = EXIT_STOPPED
            say(f"stopped at step {now.step}; the same command goes on from there")
        elif now.status == "failed":
            code = now.exit_code if now.exit_code in (EXIT_CONFIG, EXIT_UNRECOVERABLE) else EXIT_FAILED
            say(f"error: {now.reason or 'training failed'}")
        elif self.stopping and not self._grace_exceeded:
            code, now = EXIT_STOPPED, replace(now, status="stopped", reason=self.killed or "stopped")
            say("stopped before training began; the same command starts again")
        else:
            reason = self.killed or "workers ended without saying why"
            code, now = EXIT_FAILED, replace(now, status="failed", reason=reason)
            say(f"error: {reason}; the last checkpoint is intact, the same command goes on from there")
        self._write_state(replace(now, exit_code=code, ended=True))
        return code

    def _write_state(self, state: State) -> None:
        """Write this node's state; a disk that refuses is a warning, since the exit code still tells."""
        state = replace(state, attempt=self.attempt, updated=time.time())
        try:
            write_state(self.directory, self.rank, state)
        except OSError as error:
            say(f"warning: the state of the run cannot be written ({error.strerror})")
