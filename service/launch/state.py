"""The outcome of a run on one node, as a small JSON file in the run directory.

torchrun exits with 1 whatever its workers did, so the workers write what happened to
state/node-<rank>.json and the launcher's exit code comes from there. `attempt` is a random id that the
launcher of this start gives its workers (HIERA_ATTEMPT), so that an earlier start's file is never believed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from service import streams
from service.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_UNRECOVERABLE
from service.files import replacing

ATTEMPT_VARIABLE = "HIERA_ATTEMPT"
RUN_DIR_VARIABLE = "HIERA_RUN_DIR"
NODE_RANK_VARIABLE = "HIERA_NODE_RANK"

Status = Literal["running", "finished", "stopped", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)
_EXIT_CODES: dict[str, int] = {
    "running": EXIT_FAILED,
    "finished": EXIT_FINISHED,
    "stopped": EXIT_STOPPED,
    "failed": EXIT_FAILED,
}


@dataclass(frozen=True)
class State:
    """What a node last said.

    `step` counts optimizer steps done, `reason` is one or two lines for the user, `updated` is Unix time.
    """

    status: Status
    step: int = 0
    reason: str = ""
    exit_code: int = EXIT_FAILED
    attempt: str = ""
    updated: float = 0.0
    ended: bool = False
    """The launcher of the node has left: nothing will be started again."""

    @property
    def is_final(self) -> bool:
        """True when starting the workers again could not change the outcome."""
        if self.status == "failed":
            return self.exit_code in (EXIT_CONFIG, EXIT_UNRECOVERABLE)
        return self.status in ("finished", "stopped")


def state_path(run_dir: Path, node_rank: int) -> Path:
    """File of one node."""
    return run_dir / "state" / f"node-{node_rank}.json"


def read_state(run_dir: Path, node_rank: int) -> State | None:
    """State of a node; None when there is none or it is not readable as one."""
    try:
        raw = json.loads(state_path(run_dir, node_rank).read_text(encoding="utf-8"))
        if raw["status"] not in STATUSES:
            return None
        return State(
            status=raw["status"],
            step=int(raw["step"]),
            reason=str(raw["reason"]),
            exit_code=int(raw["exit_code"]),
            attempt=str(raw["attempt"]),
            updated=float(raw["updated"]),
            ended=bool(raw.get("ended", False)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_state(run_dir: Path, node_rank: int, state: State) -> None:
    """Replace the state of a node: whole or not at all. Raises OSError (a full disk, say)."""
    path = state_path(run_dir, node_rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def report(status: Status, *, step: int = 0, reason: str = "", exit_code: int | None = None) -> bool:
    """Worker side: write this node's state by HIERA_RUN_DIR, HIERA_NODE_RANK and HIERA_ATTEMPT.

    `exit_code` defaults to the status's own. A final outcome of the same attempt (State.is_final) is kept:
    what other ranks meet while they are torn down is a consequence of it. Returns False when nothing was
    written: not started by the launcher, outcome already final, or the disk refuses (said on stderr).
    """
    run_dir, attempt = os.environ.get(RUN_DIR_VARIABLE), os.environ.get(ATTEMPT_VARIABLE)
    if not run_dir or not attempt:
        return False
    node_rank = int(os.environ.get(NODE_RANK_VARIABLE, "0"))
    before = read_state(Path(run_dir), node_rank)
    if before is not None and before.attempt == attempt and before.is_final:
        return False
    code = _EXIT_CODES[status] if exit_code is None else exit_code
    state = State(status, step, reason, code, attempt, time.time())
    try:
        write_state(Path(run_dir), node_rank, state)
    except OSError as error:
        path = state_path(Path(run_dir), node_rank)
        streams.say(f"hiera-train: warning: cannot write {path}: {error.strerror or error}")
        return False
    return True
