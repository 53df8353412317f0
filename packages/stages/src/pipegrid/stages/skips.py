"""Values that later stages use besides the hidden states: which they are, and how a stage takes and gives them.

Such a value is what a part of the model (a layer, an embedding, a vision tower) has returned, on the stage that holds
the part. Another stage has a stand-in for the part, and where it uses the value, the stand-in returns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define, field, frozen
from torch import Tensor, nn

from pipegrid.core.edge import Edge
from pipegrid.core.skips import Uses, values_by_edge
from pipegrid.stages.errors import CutError
from pipegrid.stages.torch_compat import TABLES, copied, mapped_by_place, mappings_of, tensors_in


@frozen(order=True)
class Value:
    """A tensor that a part of the model returns, or a parameter."""

    part: str  # its dotted name; the name of a parameter
    call: int = -1  # of the part in a forward, from 0; -1 of a parameter
    place: str = ""  # in what it returns, such as ``[0]``, or among its arguments (`place_in`)

    @property
    def is_parameter(self) -> bool:
        """Whether it is one, which every use in a forward reads."""
        return self.call < 0

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call > 0 else ""
        return f"{self.part}{self.place}{call}"


def place_in(argument: str, key: object) -> str:
    """The place of an entry that a layer puts into a mapping among its arguments."""
    return f", {argument}[{key!r}]"


@frozen(eq=False)
class Skips:
    """The values of a call that stages use past those between."""

    uses: Mapping[Value, Uses]  # of each value
    # by stage, the values that are in what the stage before sends, each with its place among the tensors there
    held: Mapping[int, Mapping[Value, int]] = field(factory=dict)
    # of the parts among them that are inside of layers, and have hooks of the model's own code, in the order in
    # which they run: what they return, with scalars in place of tensors
    inside: Mapping[str, Any] = field(factory=dict)
    # of the layers among them that put entries into mappings among their arguments: these, by argument and key,
    # likewise
    filled: Mapping[str, Mapping[str, Mapping[Any, Any]]] = field(factory=dict)
    names: Mapping[str, Sequence[str]] = field(factory=dict)  # of the parameters among them, all names, by the first

    def there(self, stage: int) -> set[Value]:
        """The values that a stage has, by whatever way."""
        return {value for value, one in self.uses.items() if stage in (one.source, *one.users, *one.held)}


@define(eq=False)
class SkipCarrier:
    """Takes and gives the values of one stage, in one forward after the other."""

    whole: nn.Module  # the stage's modules
    stage: int
    placement: Sequence[int]  # the position of each stage
    skips: Skips | None = None  # of the running call
    arrived: Mapping[Edge, Sequence[Tensor | None]] | None = None  # by edge; None in a step without such edges
    hosts: Sequence[Hashable] | None = None  # what a stage's position shares with others; None: values go straight
    values: dict[Value, Tensor] = field(factory=dict, init=False)  # of this stage, in the running forward
    copies: bool = False  # the model writes in place to what its parts return
    real: set[str] = field(factory=set)  # the parts of other stages that run here, as their parameters came
    given: set[str] = field(factory=set)  # the parts whose results came from other stages
    _tables: list[tuple[dict[str, Any], str, Any]] = field(factory=list, init=False)
    _calls: Counter[str] = field(factory=Counter, init=False)
    _hooked: set[str] = field(factory=set, init=False)
    _wanted: dict[tuple[str, int], dict[str, Value]] = field(factory=dict, init=False)
    _edges: dict[Edge, tuple[Value, ...]] = field(factory=dict, init=False)

    def begin(self, skips: Skips, received: Any, *, copies: bool) -> None:
        """Before a forward: take what came by edges, and what is in the hidden states.

        Raises CutError where another number of values came than the call has.
        """
        if self.arrived is None:
            parameters = [value for value in skips.uses if value.is_parameter]
            hint = f"; parts of {parameters[0]} that run after the layers alone: Names(head=...)" if parameters else ""
            raise CutError(
                f"stages hand on {', '.join(map(str, skips.uses))} past others, along edges that this step does not "
                "have: Pipeline finds them in its first step, but not where a forward needs what comes from another "
                "module (compute them inside of layers); a communicator takes graph=stage.graph, of stages that were "
                f"cut with batch=...{hint}"
            )
        if skips is not self.skips:
            self.prepare(skips)
        self._forget()
        self._calls.clear()
        self.copies = copies
        for edge, values in self._edges.items():
            if edge.destination != self.stage:
                continue
            came = [one for one in self.arrived.get(edge, ()) if one is not None]
            if len(came) != len(values):
                raise CutError(
                    f"stage {self.stage} takes {', '.join(map(str, values))} of stage {edge.source}, and {len(came)} "
                    f"values came along edge {edge}; stages are cut with a batch of the form that they are called with"
                )
            self.values.update(zip(values, came, strict=True))
        for value in self.values:
            if value.is_parameter:
                self._put(value)
        inside = tensors_in(received) if received is not None else []
        for value, place in skips.held.get(self.stage, {}).items():
            self.values[value] = inside[place]

    def prepare(self, skips: Skips) -> None:
        """Before forwards of a call with other values: hooks on the parts that return them."""
        self.skips = skips
        self._edges = values_by_edge(skips.uses, self.placement, self.hosts)
        self._wanted = {}
        self.real.clear()
        self.given.clear()
        for value in skips.there(self.stage):
            if value.is_parameter:
                continue
            if skips.uses[value].source != self.stage:
                self.given.add(value.part)
            self._wanted.setdefault((value.part, value.call), {})[value.place] = value
        there = {part for part, _ in self._wanted}
        for part, result in skips.inside.items():
            if part in there - self._hooked and part in self.given:
                self._stand_in(part, result)
        for part in there - self._hooked:
            self._hooked.add(part)
            hook = self.whole.get_submodule(part).register_forward_hook
            # The model's hooks take what came.
            hook(partial(self._returned, part), prepend=part in skips.inside, with_kwargs=True)

    def _stand_in(self, part: str, result: Any) -> None:
        """Have a layer's stand-in call a module inside of it, which returns ``result``, for hooks of the model."""
        path, layer = part.split("."), self.whole
        while "ghost" not in vars(layer):
            layer = layer._modules[path.pop(0)]  # type: ignore[assignment]  # noqa: SLF001 -- as in `place_of`
        module = copied(vars(layer)["ghost"].get_submodule(".".join(path)))
        for table in TABLES:
            vars(module)[table] = {}
        vars(module)["forward"] = lambda: result
        vars(layer).setdefault("inside", {})[part] = module
        for name in path[:-1]:
            layer = layer._modules.setdefault(name, nn.Module())  # type: ignore[assignment]  # noqa: SLF001 -- as above
        layer._modules[path[-1]] = module  # noqa: SLF001 -- `add_module` asks the ghost

    def place_of(self, parameter: str) -> tuple[dict[str, Any], str, nn.Module | None]:
        """The table and the key by which the model's own code finds a parameter; and the stand-in that has it."""
        *path, key = parameter.split(".")
        module, placeholder = self.whole, None
        for name in path:
            module = module._modules[name]  # type: ignore[assignment]  # noqa: SLF001 -- `get_submodule` reads attributes
            if "ghost" in vars(module):
                placeholder, module = placeholder or module, vars(module)["ghost"]
        table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers  # noqa: SLF001
        return table, key, placeholder

    def _put(self, value: Value) -> None:
        """Have the model's own code find a parameter that came, under each of its names, until the end of a forward."""
        assert self.skips is not None  # set by `prepare`
        tensor = self.values[value]
        for name in self.skips.names[value.part]:
            table, key, placeholder = self.place_of(name)
            if table[key] is not tensor:
                self._tables.append((table, key, table[key]))
                table[key] = tensor
            if placeholder is not None:
                self.real.add(str(placeholder.name))

    def _returned(self, part: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
        """Hook of a part: note what it has made here, or return what came in place of a stand-in."""
        call = self._calls[part]
        self._calls[part] += 1
        wanted = self._wanted.get((part, call))
        if wanted is None or self.skips is None:
            return None
        changed = False

        def of(prefix: str, place: str, leaf: Any) -> Any:
            nonlocal changed
            value = wanted.get(prefix + place)
            if value is None or not isinstance(leaf, Tensor):
                return leaf
            if value in self.values:
                changed = True
                return self.values[value].clone() if self.copies else self.values[value]
            self.values[value] = leaf
            if self.copies:  # kept from what the model's own code writes
                self.values[value] = leaf.clone()
            return leaf

        mapped = mapped_by_place(partial(of, ""), result)
        returned = mapped if changed else None
        filled, given = self.skips.filled.get(part, {}), part in self.given
        mappings = mappings_of(args, kwargs) if filled else {}
        # What a layer has put into its arguments is taken or, where its results came, what came is put in.
        for argument, entries in filled.items():
            mapping = mappings.get(argument, {})
            for key in entries if given else entries.keys() & mapping.keys():
                entry = entries[key] if given else mapping[key]
                entry = mapped_by_place(partial(of, place_in(argument, key)), entry)
                if given:
                    mapping[key] = entry
        return returned

    def leaving(self) -> dict[Edge, list[Tensor]]:
        """After a forward: what leaves by each edge. Raises CutError where a part has not returned a value in it."""
        return {
            edge: [self._own(value) for value in values]
            for edge, values in self._edges.items()
            if edge.source == self.stage
        }

    def _own(self, value: Value) -> Tensor:
        if value.is_parameter and value not in self.values:
            parameter = self.whole.get_parameter(value.part)
            if type(parameter) is not nn.Parameter:
                kind = type(parameter).__name__
                raise CutError(f"{value} is a {kind}, and other stages use it; they take plain tensors")
            # A view, so that gradients that come back are added as those of a use on this stage.
            return parameter.view_as(parameter)
        if value not in self.values:
            raise CutError(f"{value.part} has not returned {value} on stage {self.stage}, which later stages use")
        tensor = self.values[value]
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def end(self) -> None:
        """Drop the tensors of a forward."""
        self._forget()
        self.arrived = None

    def _forget(self) -> None:
        self.values.clear()
        while self._tables:
            table, key, before = self._tables.pop()
            table[key] = before
