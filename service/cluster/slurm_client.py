"""Talking to Slurm by its own commands: submit, ask, cancel.

squeue is enough to follow a job; sacct is asked when the controller has forgotten it, and where there is no
accounting the directory of the logs still tells how it ended. Fields that a user chose (names, paths) are
never parsed out of the middle of a line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from service.cluster.slurm import COMMENT, log_directory
from service.errors import EXIT_FAILED, UserError

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Entry:
    """A job or a task of an array. `state` in Slurm's words; `logs` is None when nobody knows any more."""

    job: str
    state: str
    reason: str
    restarts: int
    logs: Path | None

    @property
    def exit_code(self) -> int | None:
        """What the batch script noted at its end."""
        try:
            return int((self.logs or Path()).joinpath("exit-code").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None


def call(*command: str, text: str | None = None) -> str:
    """Output of a command of Slurm. Raises UserError with Slurm's own reason in one line."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on this machine; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no answer in {TIMEOUT_SECONDS} s", EXIT_FAILED) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # The line of a refused job, or of a controller that is not found; else the first, of a wrong option.
        telling = [line for line in lines if "failed:" in line or "fatal:" in line] or lines[:1]
        raise UserError(telling[-1] if telling else f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout


def submit(script: str, logs: str) -> str:
    """Hand a batch script to sbatch in the current directory; returns the job's id."""
    job = call("sbatch", "--parsable", text=script).strip().split(";")[0]
    _remember(job, Path(os.path.abspath(logs)))
    return job


def cancel(job: str) -> None:
    """Cancel a job, or all tasks of an array."""
    call("scancel", job)


def find(job: str) -> list[Entry]:
    """The job, or each task of an array; empty when nobody knows it."""
    try:
        lines = _squeue("--jobs", job)
    except UserError as error:
        # What "Invalid job id" means: forgotten, or never there.
        if "nvalid job id" not in str(error):
            raise
        lines = []
    return [_entry(line, job) for line in lines] or _from_accounting(job) or _from_files(job)


def ours() -> list[Entry]:
    """All jobs of this user that hiera-train submitted and the controller still knows."""
    user = str(os.getuid())
    lines = [line for line in _squeue("--user", user) if line.split("|", 4)[4].startswith(COMMENT)]
    return [_entry(line, None) for line in lines]


def _squeue(*selection: str) -> list[str]:
    # id | state | reason | array's own id | comment, which is ours and has no | or line break in it.
    text = call("squeue", "--noheader", "--states=all", "--array", "--format=%i|%T|%r|%F|%k", *selection)
    return [line for line in text.splitlines() if line.count("|") >= 4]


def _entry(line: str, job: str | None) -> Entry:
    identity, state, reason, _, comment = line.split("|", 4)
    directory = log_directory(comment.strip())
    logs = None
    if directory is not None and job is not None:
        logs = Path(_field(identity, "WorkDir"), directory, identity)
    restarts = _field(identity, "Restarts") if job is not None else "0"
    return Entry(identity, state, reason, int(restarts or 0), logs)


def _field(job: str, name: str) -> str:
    """One field of `scontrol show job`, which prints each of those used here on a line of its own."""
    text = call("scontrol", "show", "job", job)
    if name == "WorkDir":
        # The path may hold anything, also a line break; what follows it is known.
        match = re.search(r"\n   WorkDir=(.*?)\n   (?:Admin)?(?:Comment|StdErr)=", text, re.DOTALL)
    else:
        # After the line of the job's name, which may hold anything.
        match = re.search(rf"\n   [^\n]*\b{name}=(\S+)", text)
    return match.group(1) if match else ""


def _from_accounting(job: str) -> list[Entry]:
    try:
        text = call("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=JobID,State")
    except UserError:
        return []
    remembered = _remembered(job)
    entries = []
    for line in text.splitlines():
        identity, _, state = line.partition("|")
        logs = remembered / identity if remembered is not None else None
        entries.append(Entry(identity, state.split()[0] if state else "UNKNOWN", "", 0, logs))
    return entries


def _from_files(job: str) -> list[Entry]:
    remembered = _remembered(job)
    if remembered is None:
        return []
    logs = remembered / job
    entry = Entry(job, "UNKNOWN", "", 0, logs)
    if entry.exit_code is None:
        return [entry] if logs.is_dir() else []
    state = "COMPLETED" if entry.exit_code == 0 else "FAILED"
    return [Entry(job, state, "", 0, logs)]


def _record(job: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base, "hiera-train", "slurm", f"{job.split('_')[0]}.json")


def _remember(job: str, logs: Path) -> None:
    """Note where a job's logs are, for when Slurm has forgotten the job; a home that refuses is no error."""
    record = _record(job)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"logs": str(logs)}), encoding="utf-8")
    except OSError:
        pass


def _remembered(job: str) -> Path | None:
    try:
        return Path(json.loads(_record(job).read_text(encoding="utf-8"))["logs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
