"""The museum of hangs on ranks: its files, its table, and a player of orders over `torch.distributed`."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

from pipegrid.core.order import ORDER_MODELS
from pipegrid.fake_nccl import FakeGroup
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders import Launch, MessageEnd, Orders, orders_from_json
from pipegrid.plans.orders.prove import play_orders

MUSEUM = Path(__file__).parents[2] / "docs" / "museum"
# The columns of the page's table that ranks can show: a backend, and a mode of the fake NCCL.
BACKENDS = {
    "nccl-legacy": ("fake_nccl", "legacy"),
    "nccl2": ("fake_nccl", "nccl2"),
    "nccl-lazy": ("fake_nccl", "lazy"),
    "nccl-serial": ("fake_nccl", "serial"),
    "nccl-connecting": ("fake_nccl", "nccl2"),  # with `connects_in_batches`
    "gloo": ("gloo", None),
}
_COLUMNS = ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial", "nccl-connecting", "gloo")
_ROW = re.compile(r"^\| ([\w-]+) \|((?: (?:ends|hangs|crosses) \|){6})$", re.MULTILINE)
END = "the end of the orders"


def table() -> dict[tuple[str, str], str]:
    """By file and order model: ``hangs``, ``ends`` or ``crosses``; of mended orders that they end."""
    found = {
        (name, model): verdict
        for name, cells in _ROW.findall((MUSEUM / "index.md").read_text())
        for model, verdict in zip(_COLUMNS, cells.strip(" |").split(" | "), strict=True)
    }
    mended = [path.stem for path in sorted(MUSEUM.glob("*-mended.json"))]
    return found | {(name, model): "ends" for name in mended for model in _COLUMNS}


@functools.cache
def orders_of(name: str) -> Orders:
    """The orders of a file."""
    return orders_from_json((MUSEUM / f"{name}.json").read_text())


def stuck_at(name: str, model: str) -> list[str]:
    """Per rank, where its host is held by the model: a compute, or a message that it waits for at once; or `END`."""
    played = play_orders(orders_of(name), ORDER_MODELS[model])
    unended = {
        (track.rank, number)
        for track, index in zip(played.tracks, played.at, strict=True)
        for number, end in zip(track.launches, track.program.ends, strict=True)
        if index < end
    }
    return [
        next(
            (
                launch.text
                for number, launch in enumerate(launches)
                if (rank, number) in unended and (launch.is_compute or launch.holds)
            ),
            END,
        )
        for rank, launches in enumerate(played.orders.ranks)
    ]


def play(ranks, name: str, model: str) -> None:
    """Launch this rank's list as it is written, and report each step as the rank's position.

    Each message carries a number of its own; one that is received as another raises `AssertionError`.
    """
    orders, alone = orders_of(name), frozenset()
    try:
        played = play_orders(orders, ORDER_MODELS[model])
        orders, alone = played.orders, frozenset(played.alone)
    except PlanError:  # crossed messages: there is no play
        pass
    labels = sorted({message.label for launches in orders.ranks for each in launches for message in each.messages})
    if model == "nccl-connecting":
        ranks.fake_device.connects_in_batches = True
    groups = {"default": dist.group.WORLD}
    for group in sorted({m.group for launches in orders.ranks for each in launches for m in each.messages}):
        groups.setdefault(group, dist.new_group())
    if not all(orders.begins):
        _connect(ranks, orders, groups)
    player = _Player(ranks, labels, groups)
    for number, launch in enumerate(orders.ranks[ranks.rank]):
        ranks.report_position(launch.text)
        # The other end of a message that stands alone was launched before the fragment, and has ended.
        player.launch(launch, [m for i, m in enumerate(launch.messages) if (ranks.rank, number, i) not in alone])
    ranks.report_position(END)
    player.finish()


def _connect(ranks, orders: Orders, groups) -> None:
    """What came before a fragment has connected: every group by a collective, every pair by lone messages."""
    pairs = {
        (message.group, *sorted((rank, message.peer)))
        for rank, launches in enumerate(orders.ranks)
        for launch in launches
        for message in launch.messages
    }
    for group in groups.values():
        dist.all_reduce(torch.zeros(1), group=group)
    for name, low, high in sorted(pairs):
        for sender, receiver in ((low, high), (high, low)):
            if ranks.rank == sender:
                dist.isend(torch.zeros(1), receiver, groups[name]).wait()
            elif ranks.rank == receiver:
                dist.irecv(torch.zeros(1), sender, groups[name]).wait()


class _Player:
    """One rank's messages under way."""

    def __init__(self, ranks, labels: list[str], groups) -> None:
        self.ranks, self.labels, self.groups = ranks, labels, groups
        self.under_way: dict[tuple[str, str], tuple[dist.Work, torch.Tensor]] = {}  # by way and label

    def launch(self, launch: Launch, messages: Collection[MessageEnd]) -> None:
        operations = [self._operation(message) for message in messages]
        if launch.batched:
            for name in dict.fromkeys(message.group for message in messages):
                own = [(m, p2p) for m, p2p in zip(messages, operations, strict=True) if m.group == name]
                works = _batch(self.groups[name], [p2p for _, p2p in own])
                for (message, p2p), work in zip(own, works, strict=True):
                    self.under_way[message.way, message.label] = work, p2p.tensor
        else:
            for message, p2p in zip(messages, operations, strict=True):
                self.under_way[message.way, message.label] = p2p.op(p2p.tensor, p2p.peer, p2p.group), p2p.tensor
        waited = [(m.way, m.label) for m in messages] if launch.holds else []
        for key in [*waited, *(("receive", label) for label in sorted(launch.needs))]:
            self._wait(key)

    def finish(self) -> None:
        """Wait for all that is left."""
        for key in list(self.under_way):
            self._wait(key)

    def _operation(self, message: MessageEnd) -> dist.P2POp:
        value = float(self.labels.index(message.label)) if message.way == "send" else -1.0
        verb = dist.isend if message.way == "send" else dist.irecv
        return dist.P2POp(verb, torch.full((2,), value), message.peer, self.groups[message.group])

    def _wait(self, key: tuple[str, str]) -> None:
        if key not in self.under_way:  # came before the fragment
            return
        work, tensor = self.under_way.pop(key)
        work.wait()
        found = self.labels[int(tensor[0])]
        assert found == key[1], f"crossed: {found!r} was received as {key[1]!r}"


def _batch(group, operations: list[dist.P2POp]) -> list:
    """A work for each message of a batch, as `batch_isend_irecv` launches it: over NCCL there is one for all.

    Torch does not coalesce for groups written in Python.
    """
    if not isinstance(group, FakeGroup):
        return dist.batch_isend_irecv(operations)
    group._start_coalescing(torch.device("cpu"))
    for p2p in operations:
        p2p.op(p2p.tensor, p2p.peer, p2p.group)
    return [group._end_coalescing(torch.device("cpu"))] * len(operations)
