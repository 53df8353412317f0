"""Write docs/troubleshooting.md, every error class with a message, its cause, a remedy: `tools/troubleshooting.py`.

The cause is the class's docstring, the remedy a line of `error_remedies.toml`. A message is that of an error which
`error_examples` really raises. Where that needs several ranks, and beside it, the page has the texts as they are in the
sources, with … for each value.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
REMEDIES = ROOT / "tools" / "error_remedies.toml"
_BUILT_IN = {"Exception", "ConnectionError", "KeyError", "RuntimeError", "TimeoutError", "TypeError", "ValueError"}

HEAD = """# Troubleshooting by error text

Search for the words of a message, without its numbers and names. Each error of the packages is here: a message as it is
raised, the cause, and what to do. `…` stands for a value. Errors of a step arrive as a `PipelineError` whose first
line is the cause: search for the name and the text in that line.

This page is made by `python tools/troubleshooting.py`.
"""


@frozen
class ErrorClass:
    """An error class: its name, the module that defines it, its docstring, and the texts of its calls."""

    name: str
    module: str
    cause: str
    texts: tuple[str, ...]

    @property
    def package(self) -> str:
        """The package, such as ``pipegrid.layout``."""
        return ".".join(self.module.split(".")[:2])


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    files = sorted(ROOT.glob("packages/*/src/pipegrid/**/*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def _defined(trees: dict[Path, ast.Module]) -> dict[str, tuple[Path, ast.ClassDef]]:
    """Public classes below the built-in errors; one that is no error says so where it is defined (``Leave``)."""
    found: dict[str, tuple[Path, ast.ClassDef]] = {}
    classes = [(path, node) for path, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    known = set(_BUILT_IN)
    while new := [
        (path, node)
        for path, node in classes
        if node.name not in known and known & {ast.unparse(base).split(".")[-1] for base in node.bases}
    ]:
        known |= {node.name for _, node in new}
        found |= {node.name: (path, node) for path, node in new}
    return {name: at for name, at in found.items() if not name.startswith("_") and name.endswith(("Error", "Fault"))}


def _template(node: ast.expr) -> str | None:
    """A text with … for its values; None of anything that is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else (_template(part) or "") for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_template(side) or "…" for side in (node.left, node.right)]
        return "".join(sides) if sides != ["…", "…"] else None
    return None


def _texts(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, str]]:
    """The class and the text of each call of an error, also of a text that a variable holds."""
    for tree in trees.values():
        for scope in (node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))):
            held = {
                ast.unparse(node.targets[0]): _template(node.value)
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
            }
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
                name = ast.unparse(call.func)
                name = scope.name if name == "super().__init__" else name.split(".")[-1]
                for argument in call.args:
                    is_held = isinstance(argument, (ast.Name, ast.Attribute))
                    text = held.get(ast.unparse(argument)) if is_held else _template(argument)
                    words = re.sub(r"\s+", " ", text or "").strip()
                    if len(re.sub(r"[…\W]", "", words)) >= 8:  # with words to search for
                        yield name, words


def error_classes() -> list[ErrorClass]:
    """All error classes, by package and name."""
    trees = _trees()
    texts: dict[str, set[str]] = {}
    for name, words in _texts(trees):
        texts.setdefault(name, set()).add(words)
    found = []
    for name, (path, node) in _defined(trees).items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts[3:])
        cause = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\nAttributes:")[0]
        found.append(ErrorClass(name, module, cause, tuple(sorted(texts.get(name, ())))))
    return sorted(found, key=lambda one: (one.package, one.name))


def _section(error: ErrorClass, example: str | None, remedy: str) -> str:
    parts = [f"### {error.name}", f"`{error.package}`, defined in `{error.module}`."]
    if example is not None:
        parts.append("```text\n" + "\n".join(line.rstrip() for line in example.splitlines()) + "\n```")
    parts += [f"**Cause.** {error.cause}", f"**Remedy.** {remedy}"]
    if error.texts:
        listed = (f"- `{text.replace('`', chr(39))}`" for text in error.texts)
        parts += ["Texts:", "\n".join(listed)]
    return "\n\n".join(parts)


def page() -> str:
    """The page, with the messages of the examples as they are raised now."""
    from error_examples import messages

    remedies = tomllib.loads(REMEDIES.read_text(encoding="utf-8"))
    examples, classes = messages(), error_classes()
    parts, package = [HEAD.rstrip()], ""
    for error in classes:
        if error.package != package:
            package = error.package
            parts.append(f"## {package}")
        parts.append(_section(error, examples.get(error.name), remedies[error.name]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(error_classes())} classes", file=sys.stderr)
