"""Reading a plan from a table of tokens, with the place of each token at hand for errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import define, field

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.plan.actions import COMPUTES, Action, ActionKind
from pipegrid.schedules.plan.header import Header, located_graph
from pipegrid.schedules.plan.plan import Lane, Plan, Step, chain
from pipegrid.schedules.plan.table_checks import Extent, check_action
from pipegrid.schedules.plan.words import Word


@define
class PlanReader:
    """Gathers header and rows in any order, then checks them against each other with places at hand.

    ``num_stages`` (of a chain) and ``num_microbatches`` are bounds from outside, where no header says them.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    header: Header = field(factory=Header)
    rows: list[list[Step]] = field(factory=list)
    tokens: list[list[tuple[Word, Action]]] = field(factory=list)

    def position(self, head: Word, words: Iterable[Word]) -> None:
        """Read the steps of a position; ``head`` is its number."""
        position = head.number("a position")
        if position < len(self.rows):
            raise head.error(f"one line for position {position}; the table has another one above")
        if position != len(self.rows):
            raise head.error(f"position {len(self.rows)}; positions are written in order from 0")
        steps, tokens = list[Step](), list[tuple[Word, Action]]()
        self.rows.append(steps)
        self.tokens.append(tokens)
        batch: list[Action] | None = None
        opened = head
        for word in words:
            text, offset = word.text, 0
            if text.startswith("["):
                if batch is not None:
                    raise word.error("']' first: a batch does not hold another")
                batch, opened, text, offset = [], word, text[1:], 1
            closes = text.endswith("]")
            text = text[:-1] if closes else text
            if closes and batch is None:
                raise word.error("'[' before ']'")
            if text:
                token = word.within(text, offset)
                action = token.action()
                tokens.append((token, action))
                if batch is None:
                    steps.append(action)
                else:
                    batch.append(action)
            if closes and batch is not None:
                if not batch:
                    raise opened.error("communications between '[' and ']'")
                for token, action in tokens[-len(batch) :]:
                    if action.kind.is_compute:
                        raise token.error("a communication; computes stand alone, outside a batch")
                steps.append(batch[0] if len(batch) == 1 else tuple(batch))
                batch = None
        if batch is not None:
            raise opened.error("']' at the end of the batch")

    def plan(self, *, num_lines: int) -> Plan:
        """The plan, checked against what the header says; ``num_lines`` is where the text ends."""
        end = Word("", num_lines, 1, "the end")
        if not self.rows:
            raise end.error("a position, '0: ...'")
        if not any(self.tokens):
            raise end.error("an action; no position does anything")
        try:
            return self._plan()
        except PlanFieldError as error:
            raise self.header.error(error) from None

    def _plan(self) -> Plan:
        header, table = self.header, Extent.of(action for _, action in self._all_tokens())
        count = self.num_microbatches
        if header.num_microbatches is not None:
            count = header.num_microbatches
            table.require_microbatches(count)
        elif count is None:
            self._require_below_actions("microbatch", lambda action: action.microbatch)
            count = table.num_microbatches
        graph = self._graph(table)
        edges = frozenset(graph.stage_edges)
        names = {group.name for group in header.groups}
        for token, action in self._all_tokens():
            try:
                check_action(action, graph=graph, edges=edges, num_microbatches=count, groups=names)
            except PlanError as error:
                raise token.error(str(error)) from None
        return Plan(
            positions=self.rows,
            graph=graph,
            placement=self._inferred_placement(graph) if header.placement is None else header.placement,
            num_microbatches=count,
            forward_only=self._forward_only(graph) if header.forward_only is None else header.forward_only,
            groups=header.groups,
            creation=self._creation() if header.creation else None,
        )

    def _all_tokens(self) -> Iterator[tuple[Word, Action]]:
        for row in self.tokens:
            yield from row

    def _graph(self, table: Extent) -> ModuleGraph:
        header = self.header
        if header.modules:
            graph = located_graph(header.modules, header.edges)
            table.require_stages(graph)
            return graph
        if header.edges:
            raise header.where["edges", 0].error("a 'modules' line that declares what the edges join")
        if self.num_stages is not None:
            return chain(self.num_stages)
        self._require_below_actions("stage", lambda action: action.stage)
        return chain(table.num_stages)

    def _require_below_actions(self, what: str, number: Callable[[Action], int | None]) -> None:
        """Refuse a number too high for the table: each stage and each microbatch takes an action."""
        count = sum(map(len, self.tokens))
        for token, action in self._all_tokens():
            if (number(action) or 0) >= count:
                raise token.error(f"a {what} below {count}, the number of actions in the table")

    def _inferred_placement(self, graph: ModuleGraph) -> list[tuple[int, ...]]:
        """Each stage where its computes are; where several positions share it, all of them do all of these.

        A stage that is also acted on elsewhere is a slip of the pen, and found here rather than as what follows
        from it.
        """
        computes: list[dict[int, set[tuple[bool, int | None]]]] = [{} for _ in range(graph.num_stages)]
        for position, row in enumerate(self.tokens):
            for _, action in row:
                if action.kind is ActionKind.COLLECTIVE:  # members of the group need not hold the stage
                    continue
                done = computes[action.stage].setdefault(position, set())
                if action.kind in COMPUTES:
                    done.add((action.kind is ActionKind.F, action.microbatch))
        placement = []
        for stage, by_position in enumerate(computes):
            if not by_position:
                tokens = list(self._all_tokens())
                after = next((token for token, action in tokens if action.stage > stage), tokens[-1][0])
                raise after.error(f"actions of stage {stage} too, which the table lacks, or a 'placement' line")
            most = max(by_position.values(), key=len)
            for position, done in by_position.items():
                if done != most:
                    stray = next(token for token, action in self.tokens[position] if action.stage == stage)
                    place = next(p for p, others in by_position.items() if others == most)
                    raise stray.error(
                        f"a stage of position {position}, as stage {stage} is at home on position {place} (which does "
                        f"{len(most)} of its computes, and this one {len(done)}); or a 'placement' line that says so"
                    )
            placement.append(tuple(by_position))
        return placement

    def _forward_only(self, graph: ModuleGraph) -> Sequence[int]:
        # A bare table without a single backward is an evaluation; one that lacks some of them is a mistake.
        backwards = (ActionKind.B, ActionKind.I, ActionKind.W)
        trains = any(action.kind in backwards for _, action in self._all_tokens())
        return () if trains or self.header.modules else range(graph.num_stages)

    def _creation(self) -> list[list[Lane | str]]:
        for position in self.header.creation:
            if position >= len(self.rows):
                raise self.header.where["creation", position].error(f"a position in 0..{len(self.rows) - 1}")
        return [self.header.creation.get(position, []) for position in range(len(self.rows))]
