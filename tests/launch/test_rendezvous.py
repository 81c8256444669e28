"""Where nodes meet: flags, environment, Slurm's node lists, addresses, the preflight."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from service.errors import UserError
from service.launch.network import choose_interface, default_route_interface, interface_addresses
from service.launch.rendezvous import (
    Rendezvous,
    expand_nodelist,
    job_port,
    parse_endpoint,
    preflight,
    resolve,
    route_address,
    timing,
)
from service.launch.torchrun import Torchrun

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[09-11]",
}


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a", ["a"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]x", ["r1n08x", "r1n09x", "r2n08x", "r2n09x"]),
        ("n[098-101].site.org", ["n098.site.org", "n099.site.org", "n100.site.org", "n101.site.org"]),
        ("a,b-1,c_2", ["a", "b-1", "c_2"]),
    ],
)
def test_nodelist(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "a[1-2", "a[x-y]", "a[1-2-3]", "a b"])
def test_bad_nodelist(nodelist: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_nodelist(nodelist)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0:1234", "node0", 1234),
        ("node0", "node0", 29400),
        ("10.0.0.1:5", "10.0.0.1", 5),
        ("[fd00::1]:77", "fd00::1", 77),
        ("[fd00::1]", "fd00::1", 29400),
        ("fd00::1", "fd00::1", 29400),
    ],
)
def test_endpoint(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host:", "host:0", "host:70000", "http://host:1", "ho st:1"])
def test_bad_endpoint(text: str) -> None:
    with pytest.raises(UserError, match="host:port"):
        parse_endpoint(text)


def test_endpoint_is_in_torchs_syntax() -> None:
    torch_utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    for host in ("fd00::1", "10.0.0.1", "node0"):
        meeting = Rendezvous(2, 0, host, 77, "x")
        assert torch_utils.parse_rendezvous_endpoint(meeting.endpoint, 1) == (host, 77)


def test_single_node() -> None:
    assert resolve(None, None, None, {}) is None
    assert resolve(1, None, None, {}) is None
    # The shell of a batch script: nobody starts the other nodes.
    assert resolve(None, None, None, {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"}) is None


def test_flags_go_before_environment() -> None:
    environment = {"HIERA_NNODES": "4", "HIERA_NODE_RANK": "3", "HIERA_RDZV_ENDPOINT": "b:2"}
    assert resolve(None, None, None, environment) == Rendezvous(4, 3, "b", 2, "hiera-b-2")
    meeting = resolve(2, 0, "a:1", environment)
    assert meeting is not None
    assert (meeting.nnodes, meeting.node_rank, meeting.host, meeting.port) == (2, 0, "a", 1)


def test_slurm_step() -> None:
    meeting = resolve(None, None, None, STEP)
    assert meeting is not None
    assert (meeting.nnodes, meeting.node_rank, meeting.host) == (3, 2, "gpu09")
    assert meeting.port == job_port("4711")
    again = resolve(None, None, None, {**STEP, "SLURM_RESTART_COUNT": "1"})
    assert again is not None
    assert again.run_id != meeting.run_id


def test_jobs_on_one_node_get_different_ports_below_the_ephemeral_range() -> None:
    ports = {job_port(str(job)) for job in range(100_000, 112_768)}
    assert len(ports) == 12_768
    assert 20_000 <= min(ports) <= max(ports) < 32_768


def test_kubernetes_index() -> None:
    environment = {"HIERA_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "HIERA_RDZV_ENDPOINT": "run-0.run:29400"}
    meeting = resolve(None, None, None, environment)
    assert meeting is not None
    assert (meeting.node_rank, meeting.host) == (1, "run-0.run")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((2, None, "a:1"), {}, "no node rank"),
        ((2, 2, "a:1"), {}, "not between 0 and 1"),
        ((2, -1, "a:1"), {}, "not between 0 and 1"),
        ((2, 0, None), {}, "no rendezvous"),
        ((0, 0, "a:1"), {}, "not a number of nodes"),
        ((None, None, None), {"HIERA_NNODES": "two"}, "HIERA_NNODES: 'two'"),
        ((None, None, None), {**STEP, "SLURM_LOCALID": "1"}, "ntasks-per-node=1"),
        ((None, None, None), {**STEP, "SLURM_JOB_NODELIST": "a[1"}, "HIERA_RDZV_ENDPOINT"),
    ],
)
def test_errors_name_what_is_missing(
    arguments: tuple[int | None, int | None, str | None], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(*arguments, environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_preflight_waits_for_node_zero() -> None:
    port = free_port()
    server = socket.socket()

    def serve() -> None:
        server.bind(("127.0.0.1", port))
        server.listen()

    timer = threading.Timer(0.2, serve)
    timer.start()
    try:
        assert preflight(Rendezvous(2, 1, "localhost", port, "x"), 10, interval=0.05) == "127.0.0.1"
    finally:
        timer.join()
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_preflight_names_host_and_port(host: str) -> None:
    port = free_port()
    with pytest.raises(UserError, match=f"{host}:{port} from node 1") as caught:
        preflight(Rendezvous(2, 1, host, port, "x"), 0.05, interval=0.05)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_preflight_ends_when_stopped() -> None:
    assert preflight(Rendezvous(2, 1, "127.0.0.1", free_port(), "x"), 60, stopped=lambda: True) == "127.0.0.1"


def test_node_zero_refuses_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}"):
            preflight(Rendezvous(2, 0, "localhost", port, "x"), 1)


def test_node_zero_finds_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.launch.rendezvous.lookup", lambda host: ["127.0.1.1"])
    monkeypatch.setattr("service.launch.rendezvous.route_address", lambda address: "10.1.2.3")
    assert preflight(Rendezvous(2, 0, "my-own-name", free_port(), "x"), 1) == "10.1.2.3"
    assert preflight(Rendezvous(2, 0, "localhost", free_port(), "x"), 1) == "127.0.1.1"


def test_route_address_of_loopback() -> None:
    assert route_address("127.0.0.1") == "127.0.0.1"


ROUTE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
wlan0\t00000000\t0100000A\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
veth1\t00000000\t0100000A\t0002\t0\t0\t1\t00000000\t0\t0\t0
"""
ROUTE6 = (
    f"{'0' * 32} 00 {'0' * 32} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth1\n"
    f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200 lo\n"
)


def test_default_route() -> None:
    assert default_route_interface(ROUTE) == "eth0"
    assert default_route_interface("", ROUTE6) == "eth1"
    assert default_route_interface("") is None


def test_interface_choice() -> None:
    addresses = {"lo": ["127.0.0.1"], "veth1": ["172.17.0.1"], "ib0": ["10.9.0.4"], "eth0": ["10.0.0.4"]}
    assert choose_interface(1, None, addresses, "eth0") == "lo"
    assert choose_interface(2, "10.9.0.4", addresses, "eth0") == "ib0"
    assert choose_interface(2, "203.0.113.1", addresses, "eth0") == "eth0"
    assert choose_interface(2, None, addresses, None) is None


def test_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in interface_addresses()["lo"]


def settings_of(nnodes: int) -> dict[str, str]:
    """What the command line of torchrun says about the rendezvous of some nodes, read by torch itself."""
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    meeting = Rendezvous(nnodes, 1, "a", 29400, "x")
    command = Torchrun(8, 60.0, Path("/tmp/x"), "x", meeting).command("module", Path("/run"), 0)
    (flag,) = (word for word in command if word.startswith("--rdzv-conf="))
    found: dict[str, str] = utils._parse_rendezvous_config(flag.partition("=")[2])
    return found


@pytest.mark.parametrize(
    ("nnodes", "heartbeat", "lost_after"), [(2, 5, 15), (32, 5, 15), (33, 60, 180), (64, 60, 180), (1024, 60, 180)]
)
def test_many_nodes_beat_seldom_and_torch_takes_it(nnodes: int, heartbeat: int, lost_after: int) -> None:
    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
    registry = pytest.importorskip("torch.distributed.elastic.rendezvous.registry")
    given = settings_of(nnodes)
    assert given.pop("is_host") == "0"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    parameters = rendezvous.RendezvousParameters(
        backend="c10d", endpoint=endpoint, run_id="x", min_nodes=1, max_nodes=1, is_host="1", **given
    )
    settings = registry.get_rendezvous_handler(parameters)._settings
    assert settings.keep_alive_interval.total_seconds() == heartbeat
    assert settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt == lost_after
    # The time that a heartbeat may take never exceeds that between two.
    assert settings.timeout.heartbeat.total_seconds() == heartbeat
    assert given == {name: str(value) for name, value in timing(nnodes).items()}
