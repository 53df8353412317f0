"""Which interface gloo listens on: the one that other hosts reach, or an error with the variable's name."""

import socket

import pytest
import torch.distributed as dist

from pipegrid.topology import GroupConnectionError, addresses
from pipegrid.topology.addresses import address_of, address_towards, gloo_interface, is_here, is_loopback, server_of

HOST_B = ("host-b", "10.9.0.2")
INTERFACES = {"lo": "127.0.0.1", "eth0": "10.9.0.1", "docker0": "172.17.0.1", "ib0": "10.8.0.1"}


@pytest.fixture(autouse=True)
def _a_host(monkeypatch):
    """This host: its own name is 127.0.1.1, and packets to 10.9 leave from eth0."""
    towards = {"10.9.0.2": "10.9.0.1", "10.9.0.1": "10.9.0.1", "host-a": "127.0.0.1", "10.7.0.9": "10.7.0.1"}
    monkeypatch.setattr(addresses, "address_towards", lambda host: towards.get(host, ""))
    monkeypatch.setattr(addresses, "address_of", lambda name: INTERFACES.get(name, ""))
    monkeypatch.setattr(addresses, "_found", lambda _: [(0, 0, 0, "", ("127.0.1.1", 9))])
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(INTERFACES)))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)


def chosen(server, *others):
    return gloo_interface(server, lambda: others, "pp of 0..3")


def test_the_interface_is_the_one_that_reaches_the_store():
    assert chosen("10.9.0.2", HOST_B) == "eth0"


def test_on_the_host_of_the_store_it_is_the_one_that_reaches_the_other_hosts():
    assert chosen("10.9.0.1", HOST_B) == "eth0"
    assert chosen("host-a", ("host-a", "127.0.0.1"), HOST_B) == "eth0"


@pytest.mark.parametrize(
    ("rule", "name"), [("eth", "eth0"), ("=ib0", "ib0"), ("^lo,docker,eth", "ib0"), ("docker0", "docker0")]
)
def test_nccls_variable_chooses_where_gloos_is_absent(monkeypatch, rule, name):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", rule)
    assert chosen("10.9.0.2", HOST_B) == name


def test_gloos_own_variable_is_left_to_gloo(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert chosen("10.9.0.2", HOST_B) == ""


@pytest.mark.parametrize("server", ["", "localhost", "127.0.0.1", "::1"])
def test_a_job_of_one_host_asks_nobody(server):
    assert gloo_interface(server, lambda: pytest.fail("asked"), "pp of 0..3") == ""


def test_a_loopback_address_is_an_error_where_members_are_on_other_hosts(monkeypatch):
    own = socket.gethostname()
    with pytest.raises(GroupConnectionError, match=r"127.0.1.1 \(the address of its own name\).*host-b; set GLOO_"):
        chosen("10.7.0.9", (own, ""), HOST_B)
    assert chosen("10.7.0.9", (own, "")) == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(GroupConnectionError, match=r"would listen on 127.0.0.1 \(GLOO_SOCKET_IFNAME=lo\)"):
        chosen("10.9.0.2", HOST_B)


def test_addresses_are_the_systems(monkeypatch):
    monkeypatch.undo()
    assert address_of("no such interface") == ""
    assert is_loopback(address_towards("127.0.0.1"))
    assert is_here("127.0.0.1")
    assert address_towards("no.such.host.invalid") == ""
    assert not is_here("no.such.host.invalid")
    assert not is_loopback("10.9.0.1")
    assert not is_loopback("localhost")


def test_the_server_of_a_store_is_that_of_the_innermost_one():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert server_of(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "localhost"
    assert server_of(dist.HashStore()) == ""
