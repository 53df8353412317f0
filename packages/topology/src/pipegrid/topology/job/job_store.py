"""A store for a job in a process that is none of its ranks: it outlives each of them, rank 0 included.

``python -m pipegrid.topology serve COMMAND...`` runs a launcher beside it; a launcher script uses `serve_store`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from pipegrid.core.fields import Name, checked, index_of, shown
from pipegrid.topology.bounded_calls import bounded
from pipegrid.topology.errors import GridError, GroupConnectionError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLE = "PIPEGRID_STORE"
"""Environment variable with the address of the job's store."""

_PORTS = 2**16


@contextmanager
def serve_store(host: str = "localhost", port: int = 0) -> Iterator[str]:
    """Serve a store in this process; its address, ``host:port``, which child processes find in their environment.

    Args:
        host: a name of this machine by which the ranks reach it.
        port: 0: any free one.

    Raises:
        GridError: no such port.
        GroupConnectionError: the store cannot be served there, as where another program has the port.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, untyped

    if index_of(port) not in range(_PORTS):
        raise GridError(f"port is {shown(port)}; it must be an integer of 0 to {_PORTS - 1}")
    try:
        server = TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise GroupConnectionError(f"cannot serve the job's store at {host}:{port}: {why}") from error
    before, address = os.environ.get(VARIABLE), f"{host}:{server.port}"
    os.environ[VARIABLE] = address
    try:
        yield address
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        del server  # its port closes


def job_store(label: str, *, address: str | None = None, timeout: timedelta = timedelta(seconds=60)) -> Store:
    """The keys under ``label`` of the store that `serve_store` serves, over a connection of its own.

    Args:
        label: of the key space; each attempt of a job has its own.
        address: ``host:port``; None: that of the environment.
        timeout: for the connection.

    Raises:
        GridError: no address.
        GroupConnectionError: nothing answers there.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

    given = address if address is not None else os.environ.get(VARIABLE, "")
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= _PORTS:
        raise GridError(
            f"the address of the job's store is {given!r}; it is host:port, given or in {VARIABLE}: start the job with "
            "python -m pipegrid.topology serve, or in serve_store()"
        )
    label = checked(label, Name, "label", GridError)
    try:
        connect = partial(TCPStore, host, int(port), is_master=False, timeout=timeout)
        store = bounded(connect, seconds=timeout.total_seconds() + 1, name="pipegrid-connect")
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise GroupConnectionError(f"cannot connect to the job's store at {given} for {label!r}: {why}") from error
    return PrefixStore(f"pipegrid/job/{label}", store)
