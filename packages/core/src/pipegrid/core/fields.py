"""Validation of attrs fields and function arguments, derived from their type annotations. No torch.

The annotation is the rule: `num_positions: Count`, `ranks: tuple[Index, ...]`, `lanes: Literal["separate", "shared"]`.
A class opts in with `@attrs.frozen(field_transformer=checked_fields(SomeError))`; a function checks a free scalar with
`checked(value, Count, "num_positions", SomeError)`. Annotations without a rule are left to the type checker.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

ErrorType: TypeAlias = Callable[[str], Exception]
"""Makes the error to raise from its text."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SHOWN = 80  # characters of a value that an error repeats


def shown(value: object) -> str:
    """The representation of a value for an error: one line, shortened, with the type where it is not obvious."""
    text = " ".join(f"{value!r:.{_SHOWN}}".split())
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{text} ({type(value).__name__})"


def nearest(name: object, known: Iterable[object]) -> str:
    """The end of an error about a name: `` (did you mean 'zero_bubble_v'?)``; empty where no known name is near.

    A name is near by its letters, or as an abbreviation: the first letters of words, with their digits (``zbv``).
    """
    names = {str(one).lower(): str(one) for one in known}
    wanted = str(name).lower()
    short = re.sub(r"[^a-z0-9]", "", wanted)
    near = [one for one in names if "".join(re.findall(r"(?<![a-z])[a-z]|[0-9]", one)) == short]
    near = near or difflib.get_close_matches(wanted, names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


@attrs.frozen
class Rule:
    """The rule of a value: `convert` returns it normalized or raises ValueError; `text` completes an error.

    ``choices``: the names that a value may be, for a suggestion.
    """

    convert: Callable[[Any], Any]
    text: str
    choices: tuple[str, ...] = ()


def index_of(value: Any) -> int | None:
    """``value`` as an int, None where it is none: integers of numpy and torch are integers, booleans are not."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises its own errors for tensors that are no index
        return None


def integer(least: int | None = None, most: int | None = None) -> Rule:
    """An integer in the closed range from ``least`` to ``most``; None leaves an end open."""

    def convert(value: Any) -> int:
        number = value if type(value) is int else index_of(value)
        if number is None or (least is not None and number < least) or (most is not None and number > most):
            raise ValueError
        return number

    if least is None and most is None:
        return Rule(convert, "an integer")
    bound = f"at least {least}" if most is None else f"at most {most}" if least is None else f"{least} to {most}"
    return Rule(convert, f"an integer of {bound}")


def number(*, least: float = 0.0, above: float | None = None) -> Rule:
    """A finite number of at least ``least``, or above ``above``; numbers of other libraries become floats."""

    def convert(value: Any) -> float:
        real = value if type(value) in (int, float) else _real(value)
        try:
            valid = math.isfinite(real) and (real >= least if above is None else real > above)
        except OverflowError:  # an int beyond the range of a float
            valid = False
        if not valid:
            raise ValueError
        return real

    bound = f"of at least {least:g}" if above is None else f"above {above:g}"
    return Rule(convert, f"a finite number {bound}")


def _real(value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or not hasattr(type(value), "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements, for example
        return math.nan


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def instance(kind: type, text: str) -> Rule:
    """An instance of ``kind``, for entrances where another object would surface far away."""

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError  # noqa: TRY004 -- a rule's one signal; the caller of `checked` chooses the type
        return value

    return Rule(convert, text)


Count: TypeAlias = Annotated[int, integer(1)]
"""A number of things, at least one."""
Index: TypeAlias = Annotated[int, integer(0)]
"""A position in a sequence, or a number of things that may be none."""
Amount: TypeAlias = Annotated[float, number()]
"""A cost, a time or a size: finite and not negative."""
Seconds: TypeAlias = Annotated[float, number(above=0.0)]
"""A duration above zero."""
Name: TypeAlias = Annotated[str, Rule(_name, "a string that is not empty")]
"""The name of a dim, a module, a group."""


def checked(value: Any, annotation: Any, what: str, error: ErrorType) -> Any:
    """Validate ``value`` against ``annotation``; returns the normalized value.

    Raises:
        error: the value breaks the rule; the text says what, the value and the rule.

    Examples:
        >>> checked(8.0, float, "timeout", ValueError)
        8.0
        >>> checked(0, Count, "num_positions", ValueError)
        Traceback (most recent call last):
            ...
        ValueError: num_positions is 0; it must be an integer of at least 1
    """
    check = _check_of(annotation, kinds=True)
    return value if check is None else check(value, what, error)


def checked_fields(error: ErrorType) -> Callable[[type, list[attrs.Attribute[Any]]], list[attrs.Attribute[Any]]]:
    """A `field_transformer` of attrs that validates every field by its annotation; a field's own converter runs first.

    Raises (from the class that is built with it):
        error: a field breaks its rule: "GPipe.num_positions is 0; it must be an integer of at least 1".

    Examples:
        >>> from attrs import make_class
        >>> make_class("Shape", {}, field_transformer=checked_fields(ValueError))()
        Shape()
    """

    def transform(cls: type, attributes: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
        hints = get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
        own = inspect.get_annotations(cls)  # inherited fields are checked by their own class
        return [
            attribute.evolve(converter=_converter(attribute, check, f"{cls.__name__}.{attribute.name}", error))
            if attribute.name in own and (check := _check_of(hints[attribute.name])) is not None
            else attribute
            for attribute in attributes
        ]

    return transform


def checked_arguments(
    error: ErrorType, *, kinds: bool = False
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """A decorator that validates and normalizes the arguments of a function by its annotations.

    ``kinds``: also those that are classes, without a rule; for functions that have no better text of their own.

    Raises (from the function):
        error: an argument breaks its rule: "num_positions is 0; it must be an integer of at least 1".

    Examples:
        >>> @checked_arguments(ValueError)
        ... def ranks(tp: Count, dp: Count = 1) -> int:
        ...     return tp * dp
        ...
        >>> ranks(tp=4)
        4
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)

        @functools.cache
        def checks() -> dict[str, Check]:  # on the first call: a method may name the class that it belongs to
            hints = get_type_hints(function, include_extras=True)
            return {
                name: check
                for name in signature.parameters
                if (check := _check_of(hints.get(name), kinds=kinds)) is not None
            }

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # the error of the call itself, which names the function
            for name, value in bound.arguments.items():
                if (check := checks().get(name)) is not None:
                    bound.arguments[name] = check(value, name, error)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


Check: TypeAlias = Callable[[Any, str, ErrorType], Any]


def _converter(attribute: attrs.Attribute[Any], check: Check, what: str, error: ErrorType) -> Any:
    own: Any = attribute.converter

    def convert(value: Any) -> Any:
        return check(value if own is None else own(value), what, error)

    return convert


@functools.cache
def _check_of(annotation: Any, *, kinds: bool = False) -> Check | None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _by_rules([one for one in arguments[1:] if isinstance(one, Rule)])
    if origin is Literal:
        return _by_choice(arguments)
    if origin in (Union, types.UnionType):
        rest = [one for one in arguments if one is not type(None)]
        inner = _check_of(rest[0], kinds=kinds) if len(rest) == 1 else _by_kind(*rest) if kinds else None
        return _optional(inner) if inner is not None and type(None) in arguments else inner
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _check_of(arguments[0], kinds=kinds)
        return None if inner is None else _items(inner)
    return _by_kind(annotation) if kinds else None


_SERIES = (Sequence, Iterable, Collection)
_WORDS: dict[Any, str] = {
    bool: "True or False",
    str: "a string",
    Mapping: "a mapping",
    Callable: "a function or another callable",
    **dict.fromkeys(_SERIES, "a list or tuple"),
}


def _by_kind(*annotations: Any) -> Check | None:
    """An instance of one of the classes, and of that of the items where there is one; None where one is no class.

    Numbers, protocols and built-in containers are no classes in this sense: others stand in for them.
    """
    kinds = tuple(get_origin(one) or one for one in annotations)
    if not all(isinstance(kind, type) and not getattr(kind, "_is_protocol", False) for kind in kinds):
        return None
    unchecked = {object, Any, tuple, list, dict}
    if not unchecked.isdisjoint(kinds) or any(issubclass(kind, (int, float)) and kind is not bool for kind in kinds):
        return None
    others = tuple([kind for kind in kinds if kind not in _SERIES])
    series = len(others) < len(kinds)
    text = " or ".join(_WORDS.get(kind) or f"a{'n' * (kind.__name__[0] in 'AEIO')} {kind.__name__}" for kind in kinds)
    inner = (
        _check_of(get_args(annotations[0])[-1], kinds=True)
        if len(kinds) == 1 and kinds[0] in (*_SERIES, Mapping)
        else None
    )

    def check(value: Any, what: str, error: ErrorType) -> Any:
        if not (isinstance(value, others) or (series and _is_series(value))):
            if bool in kinds and "bool" in str(getattr(value, "dtype", "")):
                return bool(value)  # of numpy
            raise error(f"{what} is {shown(value)}; it must be {text}")
        if inner is not None and isinstance(value, (list, tuple, dict)):
            for at, item in value.items() if isinstance(value, dict) else enumerate(value):
                inner(item, f"{what}[{at!r}]", error)
        return value

    return check


def _is_series(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:  # also of a tensor without axes, which calls itself iterable
        return False
    return not isinstance(value, (str, bytes))  # their characters are not meant


def _by_rules(rules: list[Rule]) -> Check | None:
    if not rules:
        return None
    if len(rules) > 1:
        raise TypeError(f"an annotation takes one Rule, not {len(rules)}")
    convert, text, choices = rules[0].convert, rules[0].text, rules[0].choices

    def check(value: Any, what: str, error: ErrorType) -> Any:
        try:
            return convert(value)
        except ValueError:
            pass
        raise error(f"{what} is {shown(value)}{nearest(value, choices)}; it must be {text}")

    return check


def _by_choice(choices: tuple[Any, ...]) -> Check:
    text = " or ".join(map(repr, choices))

    def check(value: Any, what: str, error: ErrorType) -> Any:
        # Equal is not enough: 1 == True.
        if not any(type(value) is type(one) and value == one for one in choices):
            raise error(f"{what} is {shown(value)}{nearest(value, choices)}; it must be {text}")
        return value

    return check


def _optional(inner: Check) -> Check:
    def check(value: Any, what: str, error: ErrorType) -> Any:
        return None if value is None else inner(value, what, error)

    return check


class _ItemError(Exception):
    """An item breaks its rule."""


def _items(inner: Check) -> Check:
    def check(value: Any, what: str, error: ErrorType) -> Any:
        # A string lists its characters and a set has no order that all ranks agree on: neither is meant.
        if not isinstance(value, (str, bytes, set, frozenset)):
            try:
                items = tuple(value)
            except TypeError:  # also of a tensor without axes, which calls itself iterable
                items = None
            if items is not None:
                try:
                    return tuple([inner(item, what, _ItemError) for item in items])
                except _ItemError:  # once more, with the item's place in the text
                    return tuple([inner(item, f"{what}[{at}]", error) for at, item in enumerate(items)])
        raise error(f"{what} is {shown(value)}; it must be a list or tuple")

    return check
