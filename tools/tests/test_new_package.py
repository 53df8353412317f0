"""A new package: what it declares itself, and the lists outside of it that have to name it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [path.parent.name for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
# What a file has of every package.
LISTS = {
    "pyproject.toml": [r'"packages/{name}/src"'],
    "mkdocs.yml": [r"paths: .*\bpackages/{name}/src\b", r"- reference/{name}\.md$", r"- packages/{name}\.md$"],
    "meta/pyproject.toml": [r'"pipegrid-{name}=='],
    "README.md": [r"\]\(packages/{name}/README\.md\)"],
    "ARCHITECTURE.md": [r"^\| (?:\w+, )*{name}[ ,].*\|$"],
    "CHANGELOG.md": [r"^- `{name}`: "],
    "docs/index.md": [r"\[{name}\]\(reference/{name}\.md\)"],
    "docs/vocabulary.md": [r"^{name}/ +\w"],
    "docs/reference/{name}.md": [r"^::: pipegrid\.{name}\b"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_package_is_complete_and_every_list_names_it(name):
    folder = ROOT / "packages" / name
    metadata = tomllib.loads((folder / "pyproject.toml").read_text())
    assert metadata["project"]["name"] == f"pipegrid-{name}"
    assert "pytest" in metadata["dependency-groups"]["test"]
    for path in ("README.md", "tests", f"src/pipegrid/{name}/__init__.py", f"src/pipegrid/{name}/py.typed"):
        assert (folder / path).exists(), path
    lacking = []
    for file, patterns in LISTS.items():
        path = ROOT / file.format(name=name)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lacking += [
            f"{path.relative_to(ROOT)} has no line with {pattern.format(name=name)}"
            for pattern in patterns
            if not re.search(pattern.format(name=name), text, re.MULTILINE)
        ]
    assert lacking == []


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_says_its_idea_in_a_sentence_and_ends_with_an_example_that_a_test_runs(name):
    folder = ROOT / "packages" / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    idea = text.split("\n\n")[1]
    assert len(re.findall(r"[.](?:\s|$)", idea)) == 1
    assert re.search(r"^```python\n(?:(?!```).*\n)+```\n(?:\n```text\n(?:(?!```).*\n)+```\n)?\Z", text, re.MULTILINE)
    tests = [path.read_text() for path in (folder / "tests").glob("test_*readme.py")]
    assert any("(readme_example" in one or "README.md" in one for one in tests)
