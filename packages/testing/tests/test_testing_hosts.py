"""Tests on two hosts: names, addresses, and a wire that is slowed, cut and made whole again."""

import ctypes
import errno
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing import CUT, Fault, Wire, hosts
from pipegrid.testing.hosts import ADDRESSES, NAMES
from pipegrid.testing.messages import Channel, HostsRefused
from pipegrid.testing.wire import Carrier

pytestmark = pytest.mark.thorough


@pytest.mark.ranks(4, hosts=2)
def test_ranks_live_on_two_hosts_and_a_cut_wire_holds_messages_back(ranks):
    assert ranks.host == ranks.rank // 2
    assert socket.gethostname() == NAMES[ranks.host]
    assert socket.gethostbyname(NAMES[1 - ranks.host]) == ADDRESSES[1 - ranks.host]
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 4
    ranks.barrier()  # of a store that the wire does not reach
    if ranks.rank == 3:
        ranks.set_wire(CUT)
    ranks.barrier()
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.5)
    assert not work.is_completed()
    ranks.barrier()
    if ranks.rank == 0:
        ranks.set_wire(Wire())
    work.wait()
    assert x.item() == 16


@pytest.mark.nightly
@pytest.mark.ranks(2, hosts=2, wire=Wire(delay=0.1))
def test_a_slow_wire_takes_its_time_each_way(ranks):
    x = torch.ones(1)
    dist.all_reduce(x)
    began = time.monotonic()
    for _ in range(3):
        dist.send(x, 1) if ranks.rank == 0 else dist.recv(x, 0)
        dist.recv(x, 1) if ranks.rank == 0 else dist.send(x, 0)
    assert time.monotonic() - began >= 0.55  # a round trip each, the last send not waited for


@pytest.mark.nightly
@pytest.mark.ranks(2, hosts=2, wire=Wire(rate=2e6, loss=0.05))
def test_a_narrow_lossy_wire_delivers_all(ranks):
    x = torch.full((1 << 16,), float(ranks.rank))  # 2 Mbit: a second of the wire
    began = time.monotonic()
    dist.all_reduce(x)
    assert x.eq(1).all()
    assert time.monotonic() - began >= 0.4


@pytest.mark.nightly
@pytest.mark.ranks(2, hosts=2)
@pytest.mark.parametrize("deaf", [0, 1])
def test_one_direction(ranks, deaf):
    """What the deaf host sends arrives, as datagrams show: nothing comes back that they need."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.bind((ADDRESSES[ranks.host], 9000))
        link.settimeout(1.0)
        if ranks.rank == 0:
            ranks.set_wire(Wire(to_a=deaf != 0, to_b=deaf != 1))
        ranks.barrier()
        link.sendto(b"hear", (ADDRESSES[1 - ranks.host], 9000))
        if ranks.host == deaf:
            with pytest.raises(TimeoutError):
                link.recv(10)
        else:
            assert link.recv(10) == b"hear"
    ranks.barrier()
    if ranks.rank == 0:
        ranks.set_wire(Wire())
    ranks.barrier()


@pytest.mark.nightly
@pytest.mark.ranks(2, hosts=2)
def test_changes_of_the_wire_come_at_their_time(ranks):
    dist.barrier()
    if ranks.rank == 0:
        ranks.set_wire(CUT, after=0.2)
        ranks.set_wire(Wire(), after=1.7)
        began = time.monotonic()
    ranks.barrier()
    time.sleep(0.5)
    dist.all_reduce(torch.ones(1))
    if ranks.rank == 0:
        assert time.monotonic() - began >= 1.5


@pytest.mark.nightly
@pytest.mark.ranks(4, hosts=2)
def test_a_host_that_dies_is_silent(ranks):
    """Its ranks are killed and its wire is cut: no connection of the others is closed."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    for rank in (2, 3):
        ranks.plan_fault(Fault("kill", rank=rank, at="step 1"))
    if ranks.rank == 0:
        ranks.set_wire(CUT)
    ranks.barrier()
    ranks.reach("step 1")
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        dist.recv(torch.ones(1), ranks.rank + 2, group)


@pytest.fixture
def carried():
    """Sockets of host a and of host b, and the carrier between them."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    changes, stop = socket.socketpair()
    for _, outer in pairs:
        outer.setblocking(False)

    class End(Exception):  # noqa: N818 (of the loop)
        pass

    def end():
        raise End

    def run():
        with pytest.raises(End):
            carrier.carry(changes.fileno(), end)

    carrier = Carrier((pairs[0][1].fileno(), pairs[1][1].fileno()), Wire(rate=4e5))
    thread = threading.Thread(target=run)
    thread.start()
    yield pairs[0][0], pairs[1][0], carrier
    stop.send(b"x")
    thread.join()
    for each in (*pairs[0], *pairs[1], changes, stop):
        each.close()


def test_packets_come_in_their_order_no_faster_than_the_wire_and_not_where_it_is_cut(carried):
    a, b, carrier = carried
    began = time.monotonic()
    for number in range(5):
        a.send(bytes([number]) * 1000)
    assert [b.recv(2000)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert time.monotonic() - began >= 0.1  # 8000 bits each
    carrier.wire = Wire(to_b=False)
    a.send(b"lost")
    b.send(b"heard")
    assert a.recv(10) == b"heard"
    carrier.wire = Wire(delay=0.05)
    began = time.monotonic()
    a.send(b"late")
    assert b.recv(10) == b"late"
    assert time.monotonic() - began >= 0.05


def test_a_machine_without_namespaces_says_so(tmp_path, monkeypatch):
    def unshare(_):
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(hosts, "_libc", lambda: SimpleNamespace(unshare=unshare))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hosts.serve_hosts(Channel(theirs), tmp_path, Wire())
        answer = Channel(ours).receive()
    text = "two hosts need user namespaces and /dev/net/tun: [Errno 1] unshare: Operation not permitted"
    assert answer == HostsRefused(text)


def test_where_two_hosts_are_not_allowed_the_test_is_skipped_with_the_reason(session):
    done = session("""
        import pytest
        from pipegrid.testing.messages import HostsRefused
        from pipegrid.testing import pool

        class Refusing(pool.Channel):  # in the pytest process alone
            def receive(self):
                return HostsRefused("no namespaces here")

        pool.Channel = Refusing

        @pytest.mark.ranks(2, hosts=2)
        def test_it(ranks):
            raise AssertionError
    """)
    assert done.outcomes == {"test_it": "skipped"}
    assert "no namespaces here" in done.texts["test_it"]


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("3, hosts=2", "divides the number of ranks, 3"),
        ("2, hosts=3", "hosts is 3; it is 1 or 2"),
        ("2, wire=Wire(delay=1)", "between hosts=2"),
        ("2, hosts=2, backend='fake_nccl'", "two hosts are connected by gloo"),
        ("2, hosts=2, wire=Wire(loss=1.0)", "loss is a share"),
    ],
)
def test_a_mark_that_cannot_be_met_is_a_usage_error(session, mark, text):
    done = session(f"""
        import pytest
        from pipegrid.testing import Wire

        @pytest.mark.ranks({mark})
        def test_it(ranks):
            pass
    """)
    assert text in done.printed
    assert done.status != 0
