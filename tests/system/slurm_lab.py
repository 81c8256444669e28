"""A real Slurm cluster on this machine: slurmctld, munge, and each node in namespaces of its own.

Needs root and Debian's slurmctld, slurmd, slurm-client, munge, iproute2. A node has its own network, host
name, process ids, mounts and /dev/shm; what it shares with the others is the file system, /tmp
included. `with SlurmLab(directory) as lab:` leaves nothing behind.

By hand: `python -m tests.system.slurm_lab` starts a cluster and a shell in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.system.slurm_host import DEADLINE, PREFIX, closed_directory, missing_here, remove_network, sweep, wait_for

PATIENT_SECONDS, QUICK_SECONDS = 300, 10
"""After which a silent node is given up."""

# Runs as process 1 of a node. $1: directory of the laboratory, $2: the node, $3: a closed directory to open.
_NODE = r"""
set -e
hostname "$2"
mount --make-rprivate /
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o mode=1777 shm /dev/shm
if [ -n "$3" ]; then
    # Of a home that only root may enter, the interpreter's directory alone is shown to everybody.
    mkdir -p "$1/shown"
    mount --bind "$3" "$1/shown"
    mount -t tmpfs -o mode=755 home "/$(echo "$3" | cut -d/ -f2)"
    mkdir -p "$3"
    mount --move "$1/shown" "$3"
fi
slurmd -D -f "$1/slurm.conf" -N "$2" &
# The shell stays, reaps what is orphaned, and outlives its slurmd as a machine would.
while :; do sleep 3600 & wait $!; done
"""


class SlurmLab:
    """A cluster of `nodes` nodes, node1, node2, …, each with `cpus` cores and `gpus` pretended GPUs."""

    def __init__(self, directory: Path, nodes: int = 3, cpus: int = 4, gpus: int = 2) -> None:
        self.directory = directory
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.cpus, self.gpus = cpus, gpus
        token = secrets.token_hex(2)
        self.bridge = PREFIX + token
        self.network = f"10.{100 + int(token[:2], 16) % 100}.{int(token[2:], 16)}"
        self.socket = directory / "munge" / "socket"
        self.conf = directory / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as probe:
            probe.bind(("", 0))
            # Below the ports that Linux gives to connections.
            self.port = 10000 + probe.getsockname()[1] % 9000

    def __enter__(self) -> SlurmLab:
        sweep()
        try:
            self._write_files()
            self._start_network()
            self._start_munge()
            self.start_controller()
            for name in self.names:
                self.start_node(name)
            wait_for(lambda: self.states() == dict.fromkeys(self.names, "idle"), "for the nodes")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Files

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", "log", "dev", "shown"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        (self.directory / "munge").chmod(0o755)
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{host}({self.network}.1)",
            "SlurmctldPort": self.port,
            "SlurmdPort": self.port + 1,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.socket}",
            "StateSaveLocation": self.directory / "state",
            "SlurmdSpoolDir": self.directory / "spool/%n",
            "SlurmctldPidFile": self.directory / "slurmctld.pid",
            "SlurmdPidFile": self.directory / "slurmd-%n.pid",
            "SlurmctldLogFile": self.directory / "log/slurmctld.log",
            "SlurmdLogFile": self.directory / "log/slurmd-%n.log",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerParameters": "bf_interval=2,sched_interval=2,batch_sched_delay=0",
            # More cores and memory than this machine has.
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            # A silent node may come back by itself; one that was set down may not.
            "ReturnToService": 1,
            "SlurmctldTimeout": 10,
            # A busy machine is not a silent node; see quick_loss.
            "SlurmdTimeout": PATIENT_SECONDS,
            # From SIGTERM to SIGKILL: a run that is cancelled has to save on a busy machine.
            "KillWait": 120,
            "MessageTimeout": 60,
            "MinJobAge": 3600,
            "PropagateResourceLimits": "NONE",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        hosts = ["127.0.0.1 localhost", f"{self.network}.1 {host}"]
        for number, name in enumerate(self.names, start=10):
            lines.append(
                f"NodeName={name} NodeAddr={self.network}.{number} CPUs={self.cpus} RealMemory=8000 "
                f"Gres=gpu:{self.gpus} State=UNKNOWN"
            )
            hosts.append(f"{self.network}.{number} {name}")
        everywhere = f"Nodes={','.join(self.names)} MaxTime=INFINITE State=UP"
        lines += [f"PartitionName=lab {everywhere} Default=YES", f"PartitionName=gpu {everywhere}"]
        for number in range(self.gpus):
            device = self.directory / f"dev/gpu{number}"
            if not device.exists():
                os.mknod(device, 0o020666, os.makedev(1, 3))
        files = {
            "slurm.conf": lines,
            # A plugin named so is loaded and not used; its autodetection fails without systemd.
            "cgroup.conf": ["CgroupPlugin=cgroup/v1"],
            "gres.conf": [f"Name=gpu File={self.directory}/dev/gpu[0-{self.gpus - 1}]"],
            "hosts": hosts,
            # Nodes reach no name server, and each look-up would wait for it.
            "nsswitch.conf": ["passwd: files", "group: files", "hosts: files"],
        }
        for name, content in files.items():
            (self.directory / name).write_text("\n".join(content) + "\n")

    # Network

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _start_network(self) -> None:
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("link", "set", self.bridge, "alias", f"slurm-lab of {os.getpid()}")
        self._ip("addr", "add", f"{self.network}.1/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        for number, name in enumerate(self.names, start=10):
            space, cable = f"{self.bridge}-{name}", self.cable(name)
            self._ip("netns", "add", space)
            self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", cable, "master", self.bridge, "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "addr", "add", f"{self.network}.{number}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def cable(self, node: str) -> str:
        """Interface of this machine that leads to a node."""
        return f"{self.bridge}v{node.removeprefix('node')}"

    def cut(self, node: str) -> None:
        """Unplug a node: nobody is told."""
        self._ip("link", "set", self.cable(node), "down")

    def heal(self, node: str) -> None:
        """Plug a node in again."""
        self._ip("link", "set", self.cable(node), "up")

    # Daemons

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.directory / f"log/{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                # Nothing outlives this process, however it ends.
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={k: v for k, v in self.environment.items() if not k.startswith(("HIERA", "PYTEST"))},
                start_new_session=True,
            )

    def _start_munge(self) -> None:
        here = self.directory
        command = ["munged", "--force", "--foreground", f"--key-file={here}/munge.key"]
        command += [
            f"--socket={self.socket}",
            f"--pid-file={here}/munge/pid",
            f"--log-file={here}/log/munge.log",
        ]
        self._spawn("munged", [*command, f"--seed-file={here}/munge/seed", "--num-threads=2"])
        wait_for(self.socket.exists, "for munged")

    def start_controller(self) -> None:
        """Start slurmctld with the state it left."""
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        wait_for(lambda: "UP" in self.run("scontrol", "ping", check=False), "for slurmctld")

    def stop_controller(self) -> None:
        """End slurmctld; jobs go on."""
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        """Switch a node on."""
        (self.directory / "spool" / node).mkdir(exist_ok=True)
        closed = closed_directory()
        # --kill-child: the end of `unshare` is the end of everything on the node, as of a power cut.
        isolate = [
            "unshare",
            "--uts",
            "--ipc",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
        ]
        enter = ["nsenter", f"--net=/run/netns/{self.bridge}-{node}"]
        self._spawn(node, [*enter, *isolate, "bash", "-c", _NODE, "node", str(self.directory), node, closed])

    def kill_node(self, node: str) -> None:
        """Power cut; the cable is pulled first, so that no connection is closed in order."""
        self.cut(node)
        self._end(node, signal.SIGKILL)

    @contextlib.contextmanager
    def quick_loss(self) -> Iterator[None]:
        """Inside, Slurm gives a silent node up after QUICK_SECONDS."""
        self._set_timeout(QUICK_SECONDS)
        try:
            yield
        finally:
            self._set_timeout(PATIENT_SECONDS)

    def _set_timeout(self, seconds: int) -> None:
        text = re.sub(r"(?m)^SlurmdTimeout=.*$", f"SlurmdTimeout={seconds}", self.conf.read_text())
        self.conf.write_text(text)
        self.run("scontrol", "reconfigure")

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._daemons.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End jobs, daemons and nodes, and remove the network."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--state=PENDING", check=False)
            self.run("scancel", "--state=RUNNING", check=False)
        for name in self.names:
            self._end(name, signal.SIGKILL)
        self._end("slurmctld", signal.SIGTERM)
        self._end("munged", signal.SIGTERM)
        remove_network(self.bridge)

    # Use

    def run(self, *command: str, check: bool = True, **options: Any) -> str:
        """Output of a command of Slurm on this machine."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE, check=False, **options
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def on_node(self, node: str, *command: str, uid: int = 0, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a command on a node, as some user."""
        first = Path(f"/proc/{self._daemons[node].pid}/task/{self._daemons[node].pid}/children").read_text()
        enter = ["nsenter", f"--target={first.split()[0]}", "--all", f"--wd={cwd or self.directory}"]
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        return subprocess.Popen(
            [*enter, *user, *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def states(self) -> dict[str, str]:
        """State of each node, e.g. idle."""
        lines = self.run("sinfo", "-h", "-N", "-p", "lab", "-o", "%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        text = self.run("scontrol", "show", "job", "-o", job, check=False)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_job(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of the states; a requeued job does not wait out Slurm's two minutes."""

        def look() -> dict[str, str] | None:
            now = self.job(job)
            if now.get("JobState") in states:
                return now
            self._hurry(job, now)
            return None

        try:
            found: dict[str, str] = wait_for(look)
        except AssertionError:
            raise AssertionError(f"waited {DEADLINE:g} s for job {job} to be {states}: {self.job(job)}") from None
        return found

    def _hurry(self, job: str, now: dict[str, str]) -> None:
        """Start a requeued job soon: Slurm holds it back for 120 s.

        Not at once: a node refuses a job that was revoked there within the same second ("Job credential
        revoked"), which is what Slurm's delay is for. What is PENDING has left all nodes.
        """
        try:
            begin = time.mktime(time.strptime(now.get("EligibleTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return
        if now.get("JobState") == "PENDING" and begin > time.time() + 5:
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", check=False)

    def wait_idle(self, *nodes: str) -> None:
        """Wait until nodes have no job."""
        wanted = nodes or tuple(self.names)
        wait_for(lambda: all(self.states().get(name) == "idle" for name in wanted), "for idle nodes")

    def processes(self, mark: str) -> list[str]:
        """Command lines on this machine, the nodes included, that contain a text."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if mark in line:
                    found.append(f"{entry.name} {line}")
        return found


def main() -> None:
    """Start a cluster and a shell in it; with --check only say what is missing for one."""
    if problem := missing_here():
        sys.exit(f"no Slurm cluster can be made here: {problem}")
    if sys.argv[1:] == ["--check"]:
        return
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as directory, SlurmLab(Path(directory)) as lab:
        print(f"SLURM_CONF={lab.conf}; the cluster ends with this shell")
        subprocess.run([os.environ.get("SHELL", "/bin/bash")], env=lab.environment, check=False)


if __name__ == "__main__":
    main()
