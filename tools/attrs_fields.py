"""Types in the reference, and fields of attrs classes: an extension of griffe, which reads code without importing it.

A record gets the signature of its constructor and a table of its public fields: name, type, what the docstring's
``Attributes`` say, default. What is no argument, such as a property, stays an attribute. In signatures a name that no
package offers, of a type or a default, is what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

_DECORATORS = ("frozen", "define", "attrs.frozen", "attrs.define")


def _is_record(cls: griffe.Class) -> bool:
    return any(str(decorator.value).partition("(")[0] in _DECORATORS for decorator in cls.decorators)


def _found(name: griffe.ExprName) -> griffe.Attribute | None:
    """The constant of the same package that a name is, if it is one."""
    scope: Any = name.parent
    while scope is not None and name.name not in scope.members:
        scope = scope.parent
    found = scope.members[name.name] if scope is not None else None
    if isinstance(found, griffe.Alias):  # imported
        try:
            found = found.final_target
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None
    return found if isinstance(found, griffe.Attribute) and isinstance(found.parent, griffe.Module) else None


def _is_offered(found: griffe.Attribute) -> bool:
    """Whether a package of pipegrid has a constant in its ``__all__``, and so the reference an entry."""
    scope: Any = found.parent
    while scope is not None:
        if found.name in map(str, scope.exports or ()):
            return True
        scope = scope.parent
    return False


def _plain(annotation: Any) -> Any:
    """The type without what `Annotated` adds, which is a rule that the error of a wrong value says."""
    if isinstance(annotation, griffe.ExprName):
        found = _found(annotation)
        if found is None or not isinstance(found.value, griffe.ExprSubscript | griffe.ExprBinOp) or _is_offered(found):
            return annotation
        return _plain(found.value)
    if isinstance(annotation, griffe.ExprSubscript):
        if annotation.canonical_name == "Annotated":
            inner = annotation.slice
            return _plain(inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner)
        return griffe.ExprSubscript(_plain(annotation.left), _plain(annotation.slice))
    if isinstance(annotation, griffe.ExprTuple):
        return griffe.ExprTuple([_plain(one) for one in annotation.elements], implicit=annotation.implicit)
    if isinstance(annotation, griffe.ExprBinOp):
        return griffe.ExprBinOp(_plain(annotation.left), annotation.operator, _plain(annotation.right))
    return annotation


def _default(value: Any) -> tuple[bool, str | None]:
    """Whether a field is an argument, and its default as written."""
    if not (isinstance(value, griffe.ExprCall) and value.canonical_name in ("field", "attrs.field")):
        return True, None if value is None else str(value)
    given = {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}
    if str(given.get("init")) == "False":
        return False, None
    if "factory" in given:
        return True, f"{given['factory']}()"
    default = given.get("default")
    return True, None if default is None else str(default)


def _fields(cls: griffe.Class) -> Iterator[griffe.Attribute]:
    """The fields of a record, those of the records that it derives from first."""
    found: dict[str, griffe.Attribute] = {}
    for each in (*reversed(cls.mro()), cls):
        if _is_record(each):
            found |= {
                name: one
                for name, one in each.attributes.items()
                if one.annotation is not None and "instance-attribute" in one.labels
            }
    yield from found.values()


def _texts(cls: griffe.Class) -> dict[str, str]:
    """What the docstrings of a record and of those that it derives from say of each field."""
    said: dict[str, str] = {}
    for each in (*reversed(cls.mro()), cls):
        for section in each.docstring.parsed if each.docstring else ():
            if section.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters):
                said |= {one.name: one.description for one in section.value}
    return said


class AttrsFields(griffe.Extension):
    """Signatures and tables of fields of `attrs.frozen` and `attrs.define` classes."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add them once the whole package is read, so that bases of other modules are known."""
        self._visit(pkg)

    def _visit(self, parent: griffe.Module | griffe.Class) -> None:
        for member in list(parent.members.values()):
            if isinstance(member, griffe.Class) and _is_record(member):
                self._add(member)
            if isinstance(member, griffe.Function):
                member.returns = _plain(member.returns)
                for parameter in member.parameters:
                    parameter.annotation = _plain(parameter.annotation)
                    default = parameter.default
                    if (
                        isinstance(default, griffe.ExprName)
                        and default.name.startswith("_")
                        and (one := _found(default))
                    ):
                        # A mark of what was not given has no meaning of its own.
                        parameter.default = "..." if str(one.value) == "object()" else str(one.value)
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member)

    def _add(self, cls: griffe.Class) -> None:
        said = _texts(cls)
        parameters, hidden = [], set[str]()
        for one in _fields(cls):
            argument, default = _default(one.value)
            if argument:
                kind = griffe.ParameterKind.positional_or_keyword
                name = one.name.lstrip("_")  # as attrs takes it
                parameters.append((said.get(one.name, ""), name, _plain(one.annotation), default, kind))
                hidden |= {name} if one.is_private else set()
        if "__init__" not in cls.members and parameters:
            made = [griffe.Parameter(name, annotation=a, kind=kind, default=d) for _, name, a, d, kind in parameters]
            own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
            init = griffe.Function("__init__", parameters=griffe.Parameters(own, *made), parent=cls)
            cls.set_member("__init__", init)
        if cls.docstring is None or not parameters:
            return
        names = {name for _, name, *_ in parameters}
        sections = cls.docstring.parsed
        for section in list(sections):
            if section.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters):
                section.value = [one for one in section.value if one.name.lstrip("_") not in names]
                if not section.value:
                    sections.remove(section)
        table = [
            griffe.DocstringParameter(name, annotation=annotation, description=text, value=default)
            for text, name, annotation, default, _ in parameters
            if name not in hidden
        ]
        place = next((number for number, one in enumerate(sections) if one.kind.value != "text"), len(sections))
        sections.insert(place, griffe.DocstringSectionParameters(table, title="Fields:"))
