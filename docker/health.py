#!/usr/bin/python3 -I
"""HEALTHCHECK: asks the run in this container whether it advances; exit code 0 healthy, 1 not.

The run judges itself (service/metrics/health.py knows a step that hangs from a model that compiles). Its
endpoint is found by the launcher's listening socket, so that any metrics.host and metrics.port will do, also
a port that the kernel chose, also on the host's network with other runs beside it. Without an endpoint
(metrics.enabled=false, a taken port, a command that does not train) nothing is known to be wrong.

Needs Python's standard library only, and none of the project's packages: it runs every half minute.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

LAUNCHER = "hiera-train-container"
COMMANDS = (LAUNCHER, "hiera-train")
LISTENING = "0A"
TIMEOUT_SECONDS = 8.0
PROC = Path("/proc")


def launchers() -> Iterator[Path]:
    """/proc directories of the launchers of this container; with --pid=host others are in sight."""
    here = os.readlink(PROC / "self" / "ns" / "mnt")
    for process in PROC.iterdir():
        if process.name.isdigit():
            try:
                if os.readlink(process / "ns" / "mnt") != here:
                    continue
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(os.path.basename(word) in COMMANDS for word in words[1:2]):
                yield process


def address(text: str) -> tuple[str, int]:
    """`0100007F:2328` of /proc/net/tcp as an address to connect to: words in the machine's byte order."""
    number, port = text.split(":")
    raw = b"".join(int(number[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(number), 8))
    host = ipaddress.ip_address(raw)
    host = getattr(host, "ipv4_mapped", None) or host
    if host.is_unspecified:
        return ("127.0.0.1" if host.version == 4 else "::1"), int(port, 16)
    return str(host), int(port, 16)


def endpoints(process: Path) -> Iterator[tuple[str, int]]:
    """Addresses on which a process listens."""
    links = set()
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            # Files come and go.
            with contextlib.suppress(OSError):
                links.add(os.readlink(file))
    for table in ("tcp", "tcp6"):
        try:
            rows = (process / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in links:
                yield address(fields[1])


def ask(host: str, port: int) -> tuple[bool, str]:
    """(healthy, what the endpoint says)."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status == 200, answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, f"{host}:{port} does not answer ({type(error).__name__})"
    finally:
        connection.close()


def main() -> int:
    """Print what is known, and return the exit code for HEALTHCHECK."""
    answers = [ask(*place) for process in launchers() for place in endpoints(process)]
    for _, text in answers:
        print(text)
    if not answers:
        print("no run with a metrics endpoint")
    return 0 if all(healthy for healthy, _ in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
