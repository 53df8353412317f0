"""The two choices that are made when lanes are opened. No torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

ShapeMode: TypeAlias = Literal["agreed", "given", "header", "manifest"]
"""How a receiver learns the shapes and dtypes of what comes.

``agreed``
    The first message of a lane carries a header, and what it says holds for every later message, which then
    costs one message and no synchronization. Shapes that the receiver gives are checked against it.
``given``
    The same, and a receive must give its shapes.
``header``
    Every message has a header, on a CPU group.
``manifest``
    The sender announces the next messages of a lane in one table (`Lane.announce`), once per step.
"""

Communicators: TypeAlias = Literal["separate", "shared"]
"""``separate``: each lane has a communicator of its own, and order matters within a lane only.

``shared``: all lanes between the same two ranks use one communicator; each exchange is one batch, and the
batches of the two ranks match pairwise, in order. Takes less of a GPU, and asks more of the plan.
"""
