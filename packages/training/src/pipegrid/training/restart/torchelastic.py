"""The interface to torchrun: the number of this restart, a store for this attempt alone, the end of all restarts."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from pipegrid.topology.bounded_calls import SilentStoreError, bounded

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, untyped

_POLL_SECONDS = 0.01
# Set by NCCL's watchdog below all prefixes; a process whose heartbeat monitor finds it dumps, and ends 8 minutes later
# (ProcessGroupNCCL.hpp, `kStoreDumpKey`).
_DUMP_SIGNAL = "exception_dump"


def restart_count() -> int:
    """The number of restarts of this node's ranks by torchrun; 0 under any other launcher."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_name() -> str:
    """Names the start of torchrun that this attempt belongs to, as this node sees it."""
    text = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{socket.gethostname()}/{os.getppid()}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def stop_restarts() -> None:
    """End this node's torchrun, which would otherwise start its ranks again. Every rank calls it.

    torchrun has no exit code for that (https://github.com/pytorch/pytorch/issues/133877): the first rank of each node
    sends it SIGTERM. Nothing happens under another launcher, or when no restart is left.
    """
    environment = os.environ
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restart_count()
    if restarts > 0 and environment.get("LOCAL_RANK") == "0" and os.getppid() > 1:
        os.kill(os.getppid(), signal.SIGTERM)


def attempt_store(*, timeout: float = 60.0) -> Store | None:
    """A store with the keys of this attempt alone, for `torch.distributed.init_process_group`; every rank calls it.

    torchrun keeps one store over its restarts, with the addresses of dead ranks, and its count of restarts may differ
    between nodes: so ranks agree on a prefix. None where the launcher keeps no store; `init_process_group` makes a new
    one then.

    Raises:
        TimeoutError: ranks did not come within ``timeout`` seconds, or the launcher's store does not answer.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def connect() -> Store:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))

    def agree() -> str:
        return agree_on_name(PrefixStore("pipegrid/attempts", store), rank, world_size, timeout=timeout)

    try:  # with a second more than each needs to fail by itself
        store = bounded(connect, seconds=timeout + 1, name="pipegrid-connect")
        name = bounded(agree, seconds=timeout + 1, name="pipegrid-attempt")
    except SilentStoreError:
        raise TimeoutError(
            f"rank {rank} has waited {timeout:g} s for the launcher's store at {host}:{port}, which does not answer"
        ) from None
    made: Store = PrefixStore(f"pipegrid/attempt/{name}", store)
    return made


def agree_on_name(store: Store, rank: int, world_size: int, *, timeout: float) -> str:
    """A name that no attempt before had, the same on all ranks, over a store that keeps what dead ranks wrote.

    Rank 0 chooses it. Each other rank asks with a number of its own, and takes only the answer to that; rank 0 answers
    all it finds, questions of dead ranks included, until every rank has confirmed this name. All wait for that: in
    `init_process_group`, which comes next, torch would wait for a rank that has not come without naming it.

    The signal by which an attempt before told all its ranks to dump and to end is deleted before the first answer: no
    rank of this attempt has a process group by then that could have set it.
    """
    name, end = uuid.uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        store.set(f"question/{rank}", name)
        while not store.check([f"answer/{name}"]):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} has waited {timeout:g} s for rank 0, which has not come")
            time.sleep(_POLL_SECONDS)
        name = store.get(f"answer/{name}").decode()
        store.set(f"confirmed/{name}/{rank}", "")
    else:
        innermost = store  # below all prefixes
        while (below := getattr(innermost, "underlying_store", None)) is not None:
            innermost = below
        innermost.delete_key(_DUMP_SIGNAL)
    missing = set(range(1, world_size))
    while missing and not store.check([f"complete/{name}"]):
        for other in sorted(missing) if rank == 0 else ():
            if store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", name)
        if rank == 0 or time.monotonic() > end:
            missing -= {other for other in missing if store.check([f"confirmed/{name}/{other}"])}
        if time.monotonic() > end and (missing or rank > 0):  # all have come, and rank 0 has gone again
            raise TimeoutError(f"rank {rank} has waited {timeout:g} s; ranks {sorted(missing) or [0]} have not come")
        time.sleep(_POLL_SECONDS)
    if rank == 0:
        store.set(f"complete/{name}", "")
    return name
