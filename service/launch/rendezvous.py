"""Where the nodes of a run meet: number of nodes, this node's rank, the rendezvous endpoint and addresses.

Everything that decides is a pure function of flags and environment; `preflight` and the look-ups touch
the network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.errors import EXIT_FAILED, UserError

DEFAULT_PORT = 29400
SLURM_PORTS = (20000, 12768)
"""First port and number of ports for job ids: below 32768, where Linux takes ports for outgoing
connections.
"""


MANY_NODES = 32
"""Up to here torch's own timing of the rendezvous is kept."""


@dataclass(frozen=True)
class Rendezvous:
    """`host` and `port` of the c10d store, which node 0 serves; `run_id` is equal on all nodes of a
    launch.
    """

    nnodes: int
    node_rank: int
    host: str
    port: int
    run_id: str

    @property
    def endpoint(self) -> str:
        """host:port, IPv6 in brackets."""
        return format_endpoint(self.host, self.port)


def timing(nnodes: int) -> dict[str, int]:
    """Settings of torch's c10d rendezvous, in seconds and attempts, for a number of nodes.

    All nodes rewrite one record, one at a time, to join and at every heartbeat. Many of them with torch's
    heartbeat of 5 s keep the record so busy that heartbeats are late, and a node that misses three is struck
    off and joins again, for ever (docs/scale.md). Many nodes therefore beat once a minute; a node that is lost
    without a word is struck off after 180 s instead of 15 s.
    """
    if nnodes <= MANY_NODES:
        return {}
    return {
        "keep_alive_interval": 60,
        "keep_alive_max_attempt": 3,
        # A heartbeat that has to wait for the record is late, not lost.
        "heartbeat_timeout": 60,
        "read_timeout": 300,
    }


def format_endpoint(host: str, port: int) -> str:
    """host:port; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[v6]:port` or a bare IPv6 address. Raises UserError."""
    text = endpoint.strip()
    match = re.fullmatch(r"\[([0-9A-Fa-f:.%\w]+)\](?::(\d+))?", text)
    if match is None and text.count(":") > 1:
        match = re.fullmatch(r"([0-9A-Fa-f:.%\w]+)()", text)
    if match is None:
        match = re.fullmatch(r"([\w.-]+)(?::(\d+))?", text)
    port = int(match.group(2) or DEFAULT_PORT) if match is not None else 0
    if match is None or not 0 < port < 65536:
        raise UserError(f"rendezvous endpoint {endpoint!r} is not host:port")
    return match.group(1), port


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a Slurm node list: `gpu[01-03,7],login` is gpu01 gpu02 gpu03 gpu7 login.

    Brackets may occur several times in a name. Raises ValueError when it is no node list.
    """
    hosts: list[str] = []
    # Commas outside of brackets part the entries.
    for entry in re.split(r",(?![^\[]*\])", nodelist.strip()):
        if not entry:
            continue
        if not re.fullmatch(r"(?:[\w.-]|\[[\d,-]+\])+", entry):
            raise ValueError(f"not a node list: {nodelist!r}")
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", entry):
            choices = _expand_brackets(piece[1:-1]) if piece.startswith("[") else [piece]
            names = [name + choice for name in names for choice in choices]
        hosts.extend(names)
    if not hosts:
        raise ValueError("empty node list")
    return hosts


def _expand_brackets(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"not a range of a node list: {part!r}")
        first, last = match.group(1), match.group(2) or match.group(1)
        # Slurm pads with zeros to the width of the first number.
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def job_port(job_id: str) -> int:
    """Port of a job: jobs that share a node differ unless their ids are 12768 apart."""
    number = int(job_id) if job_id.isdigit() else zlib.crc32(job_id.encode())
    return SLURM_PORTS[0] + number % SLURM_PORTS[1]


def resolve(
    nnodes: int | None,
    node_rank: int | None,
    endpoint: str | None,
    environment: Mapping[str, str],
) -> Rendezvous | None:
    """Decide from flags, then HIERA_*, then Slurm's and Kubernetes' variables; None for a single node.

    Flags that are None (or nnodes 1, the default) are not given. Slurm counts only inside a job step, one
    task a node (srun sets SLURM_STEP_ID). Raises UserError that names what is missing.
    """
    count, count_source = _first_int(
        environment,
        ("flag --nnodes", nnodes if nnodes != 1 else None),
        ("HIERA_NNODES", None),
        # Inside a step only: in the shell of a batch script nobody starts the other nodes.
        ("SLURM_STEP_NUM_NODES", None),
        ("SLURM_NNODES" if environment.get("SLURM_STEP_ID") else "", None),
    )
    if count is None or count == 1:
        return None
    if count < 1:
        raise UserError(f"{count_source}: {count} is not a number of nodes")
    in_slurm = bool(environment.get("SLURM_JOB_ID"))
    if in_slurm and environment.get("SLURM_LOCALID", "0") not in ("", "0"):
        raise UserError("SLURM_LOCALID: one launcher a node starts all its workers; use srun --ntasks-per-node=1")
    rank, rank_source = _first_int(
        environment,
        ("flag --node-rank", node_rank),
        ("HIERA_NODE_RANK", None),
        ("SLURM_NODEID" if in_slurm else "", None),
        ("JOB_COMPLETION_INDEX", None),
    )
    if rank is None:
        raise UserError(f"{count} nodes but no node rank: give --node-rank or HIERA_NODE_RANK")
    if not 0 <= rank < count:
        raise UserError(f"{rank_source}: node rank {rank} is not between 0 and {count - 1}")
    where = endpoint or environment.get("HIERA_RDZV_ENDPOINT")
    job = environment.get("SLURM_JOB_ID", "")
    # A step may use fewer nodes than its job.
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if where:
        host, port = parse_endpoint(where)
    elif in_slurm and nodelist:
        try:
            host = expand_nodelist(nodelist)[0]
        except ValueError as error:
            raise UserError(f"SLURM_JOB_NODELIST: {error}; set HIERA_RDZV_ENDPOINT=host:port") from None
        port = job_port(job)
    else:
        raise UserError(f"{count} nodes but no rendezvous: give --rdzv-endpoint or HIERA_RDZV_ENDPOINT")
    # Equal on all nodes; a requeued job meets under another name than its former self.
    if job:
        restart = environment.get("SLURM_RESTART_COUNT", "0")
        run_id = f"slurm-{job}-{environment.get('SLURM_STEP_ID', '0')}-{restart}"
    else:
        run_id = environment.get("HIERA_RUN_ID") or f"hiera-{format_endpoint(host, port)}"
    return Rendezvous(count, rank, host, port, re.sub(r"[^\w.-]", "-", run_id))


def _first_int(environment: Mapping[str, str], *sources: tuple[str, int | None]) -> tuple[int | None, str]:
    for name, given in sources:
        if given is not None:
            return given, name
        text = environment.get(name, "") if name else ""
        if text:
            try:
                return int(text), name
            except ValueError:
                raise UserError(f"{name}: {text!r} is not a whole number") from None
    return None, ""


def lookup(host: str) -> list[str]:
    """Addresses of a host, IPv4 first. Raises OSError when it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1; False for anything that is no address."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """True when this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def route_address(address: str) -> str | None:
    """This machine's address on the route towards `address`; None when there is no route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def preflight(
    rendezvous: Rendezvous,
    timeout: float,
    *,
    interval: float = 1.0,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Wait until the rendezvous can be used from this node; returns the address to give to torchrun.

    Node 0 will serve the store: its own address that others can reach is looked for and the port tried.
    The other nodes connect, again and again until `timeout` seconds have passed, since node 0 may start
    minutes later and its name may resolve only then. Raises UserError (exit code 1: a retry may help)
    that names host:port.
    """
    deadline = time.monotonic() + timeout
    problem = ""
    told = False
    while True:
        try:
            addresses = lookup(rendezvous.host)
            if rendezvous.node_rank == 0:
                return _serving_address(rendezvous, addresses)
            address, problem = _connect(addresses, rendezvous.port, min(5.0, max(0.1, timeout)))
            if address is not None:
                return address
        except OSError as error:
            problem = error.strerror or str(error)
        if stopped():
            return rendezvous.host
        if time.monotonic() >= deadline:
            raise UserError(
                f"cannot reach the rendezvous at {rendezvous.endpoint} from node {rendezvous.node_rank} "
                f"within {timeout:g} s: {problem}; is node 0 up and the port open?",
                EXIT_FAILED,
            )
        if not told and time.monotonic() > deadline - timeout + 5:
            told = True
            say(f"waiting for the rendezvous at {rendezvous.endpoint} ({problem})")
        time.sleep(interval)


def _serving_address(rendezvous: Rendezvous, addresses: list[str]) -> str:
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", rendezvous.port))
        except OSError as error:
            raise UserError(
                f"rendezvous port {rendezvous.port} cannot be used on node 0 ({error.strerror}); "
                "choose another in --rdzv-endpoint",
                EXIT_FAILED,
            ) from None
    for address in addresses:
        if is_local(address) and not is_loopback(address):
            return address
    # /etc/hosts often maps a machine's own name to 127.0.1.1, which no other node can reach: take the
    # address of the default route. An endpoint given as localhost is taken at its word (several nodes on
    # one machine).
    if rendezvous.host not in ("localhost", "127.0.0.1", "::1") and is_loopback(addresses[0]):
        return route_address("192.0.2.1") or route_address("2001:db8::1") or addresses[0]
    return addresses[0]


def _connect(addresses: list[str], port: int, timeout: float) -> tuple[str | None, str]:
    problem = "it has no address"
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=timeout):
                return address, ""
        except OSError as error:
            problem = error.strerror or str(error)
    return None, problem
