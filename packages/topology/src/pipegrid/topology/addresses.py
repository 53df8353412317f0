"""Addresses of this host, as other hosts reach them, and the interface over which gloo connects. No torch.

Left alone, gloo listens on the address of the host's own name, which is 127.0.1.1 on many machines: no other host
reaches it, while NCCL, which looks at interfaces, works there.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable

from pipegrid.topology.errors import GroupConnectionError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable from which gloo reads its interface."""
_NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def address_towards(host: str) -> str:
    """The address from which packets to ``host`` leave this host; empty without a route to it, or without a name."""
    for family, kind, protocol, _, peer in _found(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(peer)  # of UDP: asks the routing table, and sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def is_here(host: str) -> bool:
    """Whether ``host`` is a name or an address of this host: packets to it leave from the address that they go to."""
    towards = address_towards(host)
    return bool(towards) and (is_loopback(towards) or towards in {str(peer[0]) for *_, peer in _found(host)})


def is_loopback(address: str) -> bool:
    """Whether it is an address, and one that no other host reaches, such as 127.0.1.1."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def server_of(store: object) -> str:
    """The host that serves a store, as its clients name it; empty for a store that has none."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", "")
    return host if isinstance(host, str) else ""


def _found(host: str) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return [*socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)] if host else []
    except OSError:
        return []


def gloo_interface(server: str, others: Callable[[], Iterable[tuple[str, str]]], label: str) -> str:
    """The interface over which a group shall connect; empty leaves the choice to gloo, which reads its variable.

    ``GLOO_SOCKET_IFNAME`` decides. Without it, among the interfaces that ``NCCL_SOCKET_IFNAME`` allows, the one from
    which this host reaches the store on the host ``server``, or, on the store's own host, the other hosts: ``others``
    has the names and addresses of those of the group's other ranks, and is asked where that matters.

    Raises:
        GroupConnectionError: this rank would listen on a loopback address, and some members are on other hosts.
    """
    if server in ("", "localhost") or is_loopback(server):
        return ""  # which ranks of other hosts have not reached
    named = os.environ.get(GLOO_INTERFACE, "").split(",")[0]
    listens = address_of(named) if named else ""
    if not named:
        towards = address_towards(server)
        if is_loopback(towards):
            towards = next((address_towards(peer) for _, peer in others() if peer and not is_loopback(peer)), towards)
        found = {name: address for name in _allowed() if (address := address_of(name)) and not is_loopback(address)}
        fitting = [name for name, address in found.items() if address == towards]
        if fitting or (found and _NCCL_INTERFACES in os.environ and not is_loopback(towards)):
            return fitting[0] if fitting else next(iter(found))
        listens = next((str(peer[0]) for *_, peer in _found(socket.gethostname())), "")
    here = socket.gethostname()
    if is_loopback(listens):
        apart = sorted({name for name, _ in others()} - {here})
        if apart:
            why = f"{GLOO_INTERFACE}={named}" if named else "the address of its own name"
            raise GroupConnectionError(
                f"group {label!r}: this rank, on {here}, would listen on {listens} ({why}), which other "
                f"hosts do not reach, and members are on {', '.join(apart)}; set {GLOO_INTERFACE} to an interface that "
                "all hosts reach"
            )
    return ""


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty without one, and where the system is not Linux."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _allowed() -> list[str]:
    """The interfaces that NCCL may use, by its rule: prefixes; with ``=`` names; with ``^`` all others."""
    names = [name for _, name in socket.if_nameindex()]
    rule = os.environ.get(_NCCL_INTERFACES, "")
    if not rule:
        return names
    excluded, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, given = rule.startswith("="), rule.removeprefix("=").split(",")
    chosen = [name for name in names if (name in given if exact else name.startswith(tuple(given)))]
    return [name for name in names if name not in chosen] if excluded else chosen
