"""Which network interface NCCL and gloo should use: the one on the route to the other nodes.

Left alone, NCCL may choose a bridge or veth that other nodes cannot reach, and hang (nccl#913).
"""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def default_route_interface(route: str, route6: str = "") -> str | None:
    """Interface of the default route with the lowest metric, from the text of /proc/net/route and
    ipv6_route.
    """
    candidates: list[tuple[int, str]] = []
    for line in route.splitlines()[1:]:
        fields = line.split()
        # Iface Destination Gateway Flags RefCnt Use Metric Mask …; flag 1: the route is up.
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & 1:
            candidates.append((int(fields[6]), fields[0]))
    if not candidates:
        for line in route6.splitlines():
            fields = line.split()
            # destination prefix source prefix next-hop metric refcount use flags device; lo carries the
            # reject route.
            if len(fields) == 10 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
                candidates.append((int(fields[5], 16), fields[9]))
    return min(candidates)[1] if candidates else None


def interface_addresses() -> dict[str, list[str]]:
    """Addresses of each interface of this machine: the first IPv4 address and all IPv6 addresses."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            found[name] = []
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name].append(socket.inet_ntoa(answer[20:24]))
    try:
        text = Path("/proc/net/if_inet6").read_text(encoding="ascii")
    except OSError:
        text = ""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 6:
            found.setdefault(fields[5], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found


def choose_interface(
    nnodes: int, local_address: str | None, addresses: dict[str, list[str]], default: str | None
) -> str | None:
    """Interface for NCCL and gloo; None leaves the choice to them.

    One node: the loopback, which needs neither name resolution nor a network. Several: the interface that
    has the address under which the others know this node, else the default route's.
    """
    if nnodes == 1:
        return "lo" if "lo" in addresses else None
    for name, its_addresses in addresses.items():
        if local_address is not None and local_address in its_addresses:
            return name
    return default


def find_interface(nnodes: int, local_address: str | None) -> str | None:
    """choose_interface with what this machine has; None when it cannot be read."""
    try:
        route = Path("/proc/net/route").read_text(encoding="ascii")
    except OSError:
        route = ""
    try:
        route6 = Path("/proc/net/ipv6_route").read_text(encoding="ascii")
    except OSError:
        route6 = ""
    try:
        addresses = interface_addresses()
    except OSError:
        addresses = {}
    return choose_interface(nnodes, local_address, addresses, default_route_interface(route, route6))
