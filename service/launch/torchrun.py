"""torchrun's command line for one node."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from service.launch.rendezvous import Rendezvous, format_endpoint, timing


@dataclass(frozen=True)
class Torchrun:
    """What decides torchrun's flags. `address`: where the store is; `local_address`: where others find
    this node.
    """

    workers: int
    grace_seconds: float
    log_dir: Path
    run_id: str
    rendezvous: Rendezvous | None = None
    address: str = "localhost"
    local_address: str | None = "localhost"

    def command(self, module: str, run_dir: Path, max_restarts: int) -> list[str]:
        """Command that runs `python -m module --run-dir run_dir` once a worker, through
        service.launch.worker.
        """
        if self.rendezvous is None:
            # Port 0: the store binds first and tells its port afterwards, so that two launches never collide.
            meeting = ["--nnodes=1", "--rdzv-endpoint=localhost:0", f"--rdzv-id={self.run_id}"]
        else:
            # torch would guess from host names who serves the store; containers and aliases defeat that.
            conf = {"is_host": int(self.rendezvous.node_rank == 0), **timing(self.rendezvous.nnodes)}
            meeting = [
                f"--nnodes={self.rendezvous.nnodes}",
                f"--rdzv-endpoint={format_endpoint(self.address, self.rendezvous.port)}",
                f"--rdzv-id={self.rendezvous.run_id}",
                "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items()),
            ]
        if self.local_address is not None:
            # Else torch advertises the fully qualified name, which others often cannot resolve
            # (pytorch#150532).
            meeting.append(f"--local-addr={self.local_address}")
        return [
            *(sys.executable, "-m", "service.launch.agent"),
            "--rdzv-backend=c10d",
            *meeting,
            f"--nproc-per-node={self.workers}",
            f"--max-restarts={max_restarts}",
            "--monitor-interval=0.2",
            # Stop signals are the agent's own business (service.launch.agent); torchrun keeps only this one.
            "--signals-to-handle=SIGQUIT",
            f"--shutdown-timeout={max(1, int(self.grace_seconds))}",
            # Else torchrun leaves an empty directory under /tmp each time.
            f"--log-dir={self.log_dir}",
            *("-m", "service.launch.worker", module, "--run-dir", str(run_dir)),
        ]
