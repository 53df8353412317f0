"""The table of fields that a record gets in the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import griffe
import pytest

TOOL = Path(__file__).parents[1] / "attrs_fields.py"
BASE = '''
from attrs import define, field, frozen

@frozen
class Base:
    """A base.

    Attributes:
        first: said of the base.
        size: a property.
    """

    first: int

    @property
    def size(self) -> int:
        return self.first


Size: TypeAlias = Annotated[float, abs]
'''
DERIVED = '''
from typing import Annotated, ClassVar

from attrs import define, field

from records_of_test.base import Base, Size

@define(eq=False)
class Derived(Base):
    """More.

    Attributes:
        name: said here.
        kept: no argument.
    """

    name: Annotated[str, len] | None = "a"
    table: dict[str, Annotated[int, abs]] = field(factory=dict)
    _hidden: float = field(default=1.5, repr=False)
    kept: int = field(default=0, init=False)
    LIMIT: ClassVar[int] = 3


class Plain:
    """Not a record."""

    name: str = "b"


_T = TypeVar("_T")
_Pair = Annotated[tuple[int, int], abs]
Offered: TypeAlias = Annotated[int, abs]
__all__ = ["Offered"]
_Pairs: TypeAlias = Sequence[_Pair] | None
_WAIT = timedelta(seconds=60)
_MARK: Any = object()


def function(
    pairs: _Pairs, first: _T, size: Size, count: Offered, wait: timedelta = _WAIT, name: str | None = _MARK
) -> dict[str, _Pair]:
    """Of names that a reader cannot look up."""
'''


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "records_of_test"
    folder.mkdir()
    for name, text in (("__init__", ""), ("base", BASE), ("derived", DERIVED)):
        (folder / f"{name}.py").write_text(text)
    extensions = griffe.load_extensions(str(TOOL))
    return griffe.load("records_of_test", extensions=extensions, search_paths=[tmp_path], docstring_parser="google")


def rows(cls):
    (table,) = [one for one in cls.docstring.parsed if one.title == "Fields:"]
    return [(one.name, str(one.annotation), one.value, one.description) for one in table.value]


def test_a_record_has_the_fields_of_its_bases_with_types_and_defaults(package):
    assert rows(package["derived.Derived"]) == [
        ("first", "int", None, "said of the base."),
        ("name", "str | None", "'a'", "said here."),
        ("table", "dict[str, int]", "dict()", ""),
    ]
    assert [one.name for one in package["derived.Derived"].members["__init__"].parameters] == [
        "self",
        *("first", "name", "table", "hidden"),
    ]


def test_what_is_no_argument_stays_an_attribute(package):
    for path, name in (("derived.Derived", "kept"), ("base.Base", "size")):
        (left,) = [one for one in package[path].docstring.parsed if one.kind.value == "attributes"]
        assert [one.name for one in left.value] == [name]


def test_a_class_that_is_no_record_is_left_alone(package):
    assert "__init__" not in package["derived.Plain"].members
    assert [one.kind.value for one in package["derived.Plain"].docstring.parsed] == ["text"]


def test_a_name_in_a_signature_that_no_package_offers_is_what_it_stands_for(package):
    function = package["derived.function"]
    assert [(one.name, str(one.annotation), one.default) for one in function.parameters] == [
        ("pairs", "Sequence[tuple[int, int]] | None", None),
        ("first", "_T", None),
        ("size", "float", None),
        ("count", "Offered", None),
        ("wait", "timedelta", "timedelta(seconds=60)"),
        ("name", "str | None", "..."),
    ]
    assert str(function.returns) == "dict[str, tuple[int, int]]"


def test_the_tool_imports_nothing_of_what_it_reads(package):
    assert rows(package["base.Base"])
    assert not [name for name in sys.modules if name.startswith("records_of_test")]
