"""A slow player of orders, with rules of its own: the rival of `prove_order`."""


class OrderPlayer:
    """What happens to orders, by rules over facts that are looked at again and again until nothing is new."""

    def __init__(self, found, model, *, buffered, drains):
        self.found, self.model, self.buffered, self.drains = found, model, buffered, drains
        self.launched, self.started, self.ended = set(), set(), set()
        ends = {}
        for r, launches in enumerate(found.ranks):
            for n, launch in enumerate(launches):
                for i, message in enumerate(launch.messages):
                    pair = (r, message.peer) if message.way == "send" else (message.peer, r)
                    ends.setdefault((pair, message.group, message.label), {}).setdefault(message.way, []).append(
                        (r, n, i)
                    )
        self.other = {}
        for both in ends.values():
            for one, two in zip(both["send"], both["receive"], strict=True):
                self.other[one], self.other[two] = two, one

    def batch(self, end):
        """The launch of an end and its group, if it is in a batch; each group of a batch is a call of its own."""
        launch = self.found.ranks[end[0]][end[1]]
        return [(*end[:2], launch.messages[end[2]].group)] if launch.batched else []

    def joined(self, own):
        """The other batches that start with one, where two ranks connect in the first batch between them."""
        first, met = set(), set()
        for rank, launches in enumerate(self.found.ranks):
            for number, launch in enumerate(launches):
                for i, message in enumerate(launch.messages):
                    key = rank, message.peer, message.way, message.group
                    first |= set() if key in met else {(rank, number, i)}
                    met.add(key)
        links = [{*self.batch(one), *self.batch(two)} for one, two in self.other.items() if {one, two} & first]
        together = {own}
        for _ in links:
            together |= {batch for link in links if link & together for batch in link}
        return together - {own} if self.model.connects else set()

    def group(self, r, n, i):
        """The messages that start together with message ``i`` of a launch; such parts come by their first message."""
        launch = self.found.ranks[r][n]
        if not launch.batched or self.model.batched == "none":
            return [i]
        return [j for j, m in enumerate(launch.messages) if m.group == launch.messages[i].group]

    def line(self, r, n, i):
        launch, message = self.found.ranks[r][n], self.found.ranks[r][n].messages[i]
        kind = self.model.batched if launch.batched else self.model.lone
        return {
            "rank": "all",
            "group": message.group,
            "pair": (message.group, frozenset((r, message.peer))),
            "none": (n, i),
        }[kind]

    def has_ended(self, r, n):
        count = max(1, len(self.found.ranks[r][n].messages))
        return all((r, n, i) in self.ended for i in range(count))

    def inputs(self, r, n):
        launches = self.found.ranks[r]
        return [
            (r, k, i)
            for k in range(n)
            for i, message in enumerate(launches[k].messages)
            if message.way == "receive" and message.label in launches[n].needs
        ]

    def may_launch(self, r, n):
        launches = self.found.ranks[r]
        if n and ((r, n - 1) not in self.launched or (launches[n - 1].holds and not self.has_ended(r, n - 1))):
            return False
        if launches[n].messages or not (launches[n].waits or self.model.host_waits or self.drains):
            return True
        if launches[n].waits:
            sent = [(r, k, i) for k in range(n) for i, m in enumerate(launches[k].messages) if m.way == "send"]
            return all(
                one in self.ended for one in sent if launches[one[1]].messages[one[2]].label in launches[n].waits
            )
        awaited = all(one in self.ended for one in self.inputs(r, n))
        return awaited and not (
            self.drains and any(launches[k].messages and not self.has_ended(r, k) for k in range(n))
        )

    def may_start(self, r, n, i):
        launches = self.found.ranks[r]
        computes = [k for k in range(n) if launches[k].is_compute]
        before = [
            (r, k, j)
            for k in range(n + 1)
            for j in range(len(launches[k].messages))
            if self.line(r, k, j) == self.line(r, n, i)
            and (k < n or min(self.group(r, n, j)) < min(self.group(r, n, i)))
        ]
        return (
            (r, n) in self.launched
            and all((r, k, 0) in self.ended for k in computes[-1:])
            and all(one in self.ended for one in before)
        )

    def may_end(self, r, n, i):
        messages = self.found.ranks[r][n].messages
        if self.found.ranks[r][n].waits:
            return (r, n) in self.launched
        if not messages:
            earlier = [k for k in range(n) if self.found.ranks[r][k].is_compute]
            return (
                (r, n) in self.launched
                and all(one in self.ended for one in self.inputs(r, n))
                and all((r, k, 0) in self.ended for k in earlier[-1:])
            )
        return all(
            (r, n, j) in self.started
            and ((self.buffered and messages[j].way == "send") or self.other[r, n, j] in self.started)
            for j in self.group(r, n, i)
        ) and all(
            (rank, number, j) in self.started
            for rank, number, group in self.joined((r, n, messages[i].group))
            for j, message in enumerate(self.found.ranks[rank][number].messages)
            if message.group == group
        )

    def ends(self):
        """Whether every launch ends."""
        places = [(r, n) for r, launches in enumerate(self.found.ranks) for n in range(len(launches))]
        parts = [(r, n, i) for r, n in places for i in range(max(1, len(self.found.ranks[r][n].messages)))]
        while True:
            size = len(self.launched) + len(self.started) + len(self.ended)
            self.launched |= {one for one in places if self.may_launch(*one)}
            self.started |= {one for one in parts if self.found.ranks[one[0]][one[1]].messages and self.may_start(*one)}
            self.ended |= {one for one in parts if self.may_end(*one)}
            if size == len(self.launched) + len(self.started) + len(self.ended):
                return len(self.ended) == len(parts)
