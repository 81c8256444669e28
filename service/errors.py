"""Errors a user can cause, and the exit codes that schedulers act on.

The codes follow sysexits.h where it has a fitting name, so that a batch script or a Kubernetes
podFailurePolicy can tell "run me again" from "fix the configuration first".
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_FAILED = 1
"""A failure that a retry may cure: a lost node, a CUDA error, a worker killed from outside."""
EXIT_UNRECOVERABLE = 70
"""Training failed in a way that a retry will not cure: non-finite loss, unreadable files, a full disk."""
EXIT_STOPPED = 75
"""Stopped on request after a checkpoint; the same command goes on from there (EX_TEMPFAIL)."""
EXIT_CONFIG = 78
"""The configuration or the input is wrong; do not retry (EX_CONFIG)."""


class UserError(Exception):
    """Something the user can put right. Its message is one or two lines that name the field or file and the remedy."""

    exit_code = EXIT_CONFIG

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class TrainingError(UserError):
    """Training cannot go on, and running the same command again would end the same way."""

    exit_code = EXIT_UNRECOVERABLE
