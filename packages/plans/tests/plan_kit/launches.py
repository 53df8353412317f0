"""Orders of launches at random."""

import itertools

from hypothesis import strategies as st

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans.orders import Launch, MessageEnd, Orders

MODELS = tuple(ORDER_MODELS.values())


@st.composite
def random_orders(draw, *, only_waits=False):
    """Messages between two or three ranks, each in an order of its own; some batched, held, computed on, awaited."""
    count, groups = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    held = st.just(False) if only_waits else st.booleans()
    pairs = list(itertools.permutations(range(count), 2))
    rows = [[] for _ in range(count)]
    for number, (pair, group) in enumerate(
        draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(0, groups - 1)), min_size=1, max_size=6))
    ):
        for way, rank, peer in (("send", *pair), ("receive", *pair[::-1])):
            rows[rank].append(MessageEnd(way, peer, f"m{number}", f"g{number if only_waits else group}"))
    ranks = []
    for row in rows:
        left, launches = draw(st.permutations(row)), []
        while left:
            size = draw(st.integers(1, min(3, len(left))))
            own, left = left[:size], left[size:]
            text = " ".join(f"{m.way} {m.label}" for m in own)
            batched = size > 1 or draw(st.booleans())
            launches.append(Launch(text, tuple(own), batched=batched, holds=draw(held)))
            if draw(held):
                seen = [m.label for one in launches for m in one.messages if m.way == "receive"]
                needs = draw(st.sets(st.sampled_from(seen))) if seen else set()
                launches.append(Launch("compute", needs=frozenset(needs)))
            sent = [m.label for one in launches for m in one.messages if m.way == "send"]
            if sent and draw(st.booleans()):
                launches.append(Launch("wait", waits=frozenset(draw(st.sets(st.sampled_from(sent), min_size=1)))))
        ranks.append(tuple(launches))
    whole = (True,) * count
    return Orders(tuple(ranks), begins=whole, ends=whole)
