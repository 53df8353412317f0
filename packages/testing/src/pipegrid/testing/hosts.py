"""Two hosts on this machine: a network, a host name and mounts for each, and a wire between them that tests change.

A host is three Linux namespaces inside one user namespace, so nothing needs root. Each has an interface ``wire``, a TUN
device; the process that made them carries the packets from one to the other. It is host a, its child host b, and it
holds a store on host a, as a launcher does there. A process joins a host while it has one thread, and stays.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from pipegrid.testing.messages import Channel, HostsOpen, HostsRefused
from pipegrid.testing.wire import Carrier, Wire

ADDRESSES = ("10.9.0.1", "10.9.0.2")
NAMES = ("host-a", "host-b")
INTERFACE = "wire"

_NEWNS, _NEWUTS, _NEWUSER, _NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
_HOST = _NEWNS | _NEWUTS | _NEWNET
_MS_BIND = 4096
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 1
_MTU = 9000  # fewer packets to carry
_CHANGES = "wire"  # the socket that takes changes of the wire, in the folder of the hosts
_PR_SET_PDEATHSIG = 1


class HostsError(RuntimeError):
    """The machine allows no two hosts: it has no user namespaces or no /dev/net/tun, or is not Linux."""


def set_wire(folder: Path, wire: Wire, after: float = 0.0) -> None:
    """Change the wire of the hosts of ``folder`` in ``after`` seconds; returns when that has happened or is planned."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / _CHANGES))
        channel = Channel(link)
        channel.send((wire, after))
        channel.receive()


def join(process: int) -> None:
    """Move this process, which has one thread, to the host that ``process`` holds; `OSError` where it may not."""
    descriptor = os.pidfd_open(process)
    try:
        _check(_libc().setns(descriptor, _NEWUSER | _HOST), f"setns to process {process}")
    finally:
        os.close(descriptor)
    for library in ("GLOO", "NCCL", "TP"):
        os.environ[f"{library}_SOCKET_IFNAME"] = INTERFACE


def serve_hosts(channel: Channel, folder: Path, wire: Wire) -> None:
    """Make two hosts, answer `HostsOpen` or `HostsRefused`, and carry packets until killed.

    ``folder``: by which `set_wire` finds them. ``wire``: as it is at first.
    """
    try:
        ends, second = _open_hosts(folder)
    except OSError as error:
        channel.send(HostsRefused(f"two hosts need user namespaces and /dev/net/tun: {error}"))
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # after the last fork: it has threads

    store = TCPStore(ADDRESSES[0], 0, is_master=True, wait_for_workers=False)
    carrier = Carrier(ends, wire)
    with socket.socket(socket.AF_UNIX) as changes:
        changes.bind(str(folder / _CHANGES))
        changes.listen()

        def change() -> None:
            with changes.accept()[0] as link:
                each = Channel(link)
                carrier.plan(*each.receive())  # type: ignore[misc]
                each.send(True)

        channel.send(HostsOpen((os.getpid(), second), ADDRESSES[0], store.port))
        carrier.carry(changes.fileno(), change)


def _open_hosts(folder: Path) -> tuple[tuple[int, int], int]:
    """The ends of the wire, of host a and of host b, and the process that holds host b; this one is host a."""
    if sys.platform != "linux":
        raise OSError(f"they are Linux's, and this is {sys.platform}")
    user, group = os.geteuid(), os.getegid()
    _check(_libc().unshare(_NEWUSER | _HOST), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    own = _plug(0, folder)
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        _hold_second(there, folder)
    there.close()
    with here:
        text, ends, _, _ = socket.recv_fds(here, 1 << 12, 1)
    if not ends:
        os.waitpid(child, 0)
        raise OSError(text.decode() or "the process of host b ended")
    return (own, ends[0]), child


def _hold_second(link: socket.socket, folder: Path) -> None:
    """Act as host b until the parent ends."""
    try:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _check(_libc().unshare(_HOST), "unshare")
        socket.send_fds(link, [b"open"], [_plug(1, folder)])
        while True:
            signal.pause()
    except OSError as error:
        link.send(str(error).encode())
    finally:
        os._exit(1)


def _plug(host: int, folder: Path) -> int:
    """Give the host of this process its name, its interfaces and its ``/etc/hosts``; the outer end of its wire."""
    socket.sethostname(NAMES[host])
    known = folder / f"names-of-{NAMES[host]}"
    rows = zip(("127.0.0.1", *ADDRESSES), ("localhost", *NAMES), strict=True)
    known.write_text("".join(f"{address} {name}\n" for address, name in rows))
    _check(_libc().mount(bytes(known), b"/etc/hosts", None, _MS_BIND, None), "mount of /etc/hosts")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def configure(request: int, interface: str, layout: str, *values: object) -> None:
            data = struct.pack(f"16s{layout}", interface.encode(), *values)
            fcntl.ioctl(any_socket, request, data.ljust(40, b"\0"))

        for request, address in ((_SIOCSIFADDR, ADDRESSES[host]), (_SIOCSIFNETMASK, "255.255.255.0")):
            configure(request, INTERFACE, "HH4s", socket.AF_INET, 0, socket.inet_aton(address))
        configure(_SIOCSIFMTU, INTERFACE, "i", _MTU)
        for interface in ("lo", INTERFACE):
            configure(_SIOCSIFFLAGS, interface, "h", _IFF_UP)
    return end


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
