"""The documentation site, built strict: `python tools/documentation.py` (a session of nox: `docs`).

1. The pages are gathered in `build/docs`: `docs/`, the README of each package, ARCHITECTURE, CONTRIBUTING, CHANGELOG.
   Links between them become links of the site; a link to a file that is not on the site becomes its text.
2. Zensical builds `site/` from `mkdocs.yml`. A broken link, anchor, reference or included file is an error, and so is a
   public name without an entry in the reference.
3. Each page gets its Markdown twin at the page's path (`concepts/topology.md` beside `concepts/topology/`). All of them
   together are `llms.txt` (an index, https://llmstxt.org) and `llms-full.txt`. The twin of a reference page is made
   from its HTML.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "site"
# Blocks of code, which have no links.
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
# A | in code is no end of a cell for Python-Markdown, and its escape, which a git host needs, would be shown.
_CODE_OF_CELL = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# The directive that mkdocstrings replaces by the documentation of a name.
_REFERENCE = re.compile(r"^::: ", re.MULTILINE)


def sources(root: Path = ROOT) -> dict[Path, Path]:
    """Each file of the site: its path in the repository, and its path on the site."""
    found = {path: path.relative_to(root / "docs") for path in (root / "docs").rglob("*") if path.is_file()}
    found |= {path: Path("packages") / f"{path.parent.name}.md" for path in root.glob("packages/*/README.md")}
    found |= {root / f"{name}.md": Path(f"{name.lower()}.md") for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")}
    return {path: page for path, page in sorted(found.items()) if "__pycache__" not in path.parts}


def links(text: str) -> list[str]:
    """The targets of all links and pictures of a page that are relative; blocks of code have none."""
    found = (match[3] for part in _FENCED.split(text)[::2] for match in _LINK.finditer(part))
    return [target for target in found if not re.match(r"#|[a-z]+:", target)]


def with_links(text: str, changed: Callable[[str, bool], str | None]) -> str:
    """A page with each relative link replaced by ``changed(path, is_picture)``; where that is None, by its text."""

    def link(match: re.Match[str]) -> str:
        picture, shown, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        now = changed(path, bool(picture))
        return shown if now is None else f"{picture}[{shown}]({now}{hash_}{anchor})"

    parts = _FENCED.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def relinked(source: Path, pages: dict[Path, Path]) -> str:
    """The text of a page with links as they are on the site."""

    def on_the_site(path: str, is_picture: bool) -> str | None:
        del is_picture
        page = pages.get(Path(os.path.normpath(source.parent / path)))
        return None if page is None else os.path.relpath(page, pages[source].parent)

    return with_links(source.read_text(encoding="utf-8"), on_the_site)


def for_site(text: str) -> str:
    """A page with the code in cells of its tables as Python-Markdown reads it: without escaped bars."""

    def row(match: re.Match[str]) -> str:
        return _CODE_OF_CELL.sub(lambda code: code[0].replace("\\|", "|"), match[0])

    parts = _FENCED.split(text)
    parts[::2] = [re.sub(r"^\|.*$", row, part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def stage() -> None:
    """Gather the pages in `build/docs`."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = sources()
    for source, page in pages.items():
        target = STAGE / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(for_site(relinked(source, pages)), encoding="utf-8")
        else:
            shutil.copyfile(source, target)


def navigation() -> list[tuple[str, list[Path]]]:
    """The sections of `mkdocs.yml` with all pages below them; pages outside a section are in one without a name."""
    import yaml

    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["nav"]

    def leaves(item: Any) -> Iterator[Path]:
        if isinstance(item, str):
            yield Path(item)
            return
        for part in item.values() if isinstance(item, dict) else item:
            yield from leaves(part)

    sections: list[tuple[str, list[Path]]] = [("", [])]
    for item in nav:
        for name, part in {"": item}.items() if isinstance(item, str) else item.items():
            if isinstance(part, str):
                sections[0][1].append(Path(part))
            else:
                sections.append((name, list(leaves(part))))
    return sections


def page_html(page: Path) -> Path:
    """The HTML file of a page."""
    name = page.with_suffix("")
    folder = name.parent if name.name in {"index", "README"} else name
    return SITE / folder / "index.html"


def text_of(page: Path) -> str:
    """A page in Markdown, with the documentation that a reference page names."""
    pages = sources()
    (source,) = (source for source, one in pages.items() if one == page)
    written = relinked(source, pages)
    if not _REFERENCE.search(written):
        return written
    import markdownify
    from bs4 import BeautifulSoup

    article = BeautifulSoup(page_html(page).read_text(encoding="utf-8"), "html.parser").find("article")
    if article is None:
        msg = f"{page_html(page)} has no <article>"
        raise ValueError(msg)
    for mark in article.select("a.headerlink, a.md-content__button, details"):  # details: the source of each name
        mark.decompose()
    made: str = markdownify.markdownify(str(article), heading_style="ATX", strip=["a"])
    return re.sub(r"\n{3,}", "\n\n", made).strip() + "\n"


def entries_of(html: str) -> set[str]:
    """The names that a reference page documents under a heading of their own: no members of classes, no modules."""
    return set(re.findall(r'<h\d id="pipegrid\.(?:[a-z_]\w*\.)*(\w+)" class="doc doc-heading"', html))


def undocumented() -> list[str]:
    """Public names of the packages without an entry in the reference: their own, or of a package offered whole."""
    lost = []
    for face in sorted(ROOT.glob("packages/*/src/pipegrid/*/__init__.py")):
        package, text = face.parent.name, face.read_text(encoding="utf-8")
        entries: set[str] = set()
        for name in (package, *re.findall(r"^from pipegrid\.(\w+) import \*", text, re.MULTILINE)):
            entries |= entries_of(page_html(Path("reference") / f"{name}.md").read_text(encoding="utf-8"))
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                lost += [f"pipegrid.{package}.{name}" for name in names if name not in entries]
    return lost


def search_is_as_known() -> bool:
    """Whether Zensical's search still tells its worker the sections and each query as `pasted_errors.js` expects."""
    (bundle,) = (SITE / "assets" / "javascripts").glob("bundle.*.js")
    return all(f"postMessage({{type:{kind},data:" in bundle.read_text(encoding="utf-8") for kind in (0, 2))


def summary(text: str) -> tuple[str, str]:
    """The title of a page, and the first sentence below it."""
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", text[title.end() :] if title else text)
    first = next((one.strip() for one in paragraphs if re.match(r"\n*[\w*`\[]", one)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).replace("\n", " ")
    return (title[1] if title else ""), re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")


def add_texts() -> None:
    """The Markdown twins, `llms.txt` and `llms-full.txt`."""
    index, whole = [], []
    for section, pages in navigation():
        index += [f"\n## {section}\n"] if section else []
        for page in pages:
            text = text_of(page)
            title, first = summary(text)
            (SITE / page).parent.mkdir(parents=True, exist_ok=True)
            (SITE / page).write_text(text, encoding="utf-8")
            html = page_html(page)
            twin = f'<link rel="alternate" type="text/markdown" href="{os.path.relpath(SITE / page, html.parent)}">'
            html.write_text(html.read_text(encoding="utf-8").replace("</head>", f"{twin}</head>", 1), encoding="utf-8")
            whole.append(f"<!-- {page} -->\n\n{text}")
            if not section and page == Path("index.md"):
                index = [f"# {title}\n\n> {first}\n\nEvery page in one file: [llms-full.txt](llms-full.txt).\n"]
            else:
                index.append(f"- [{title}]({page}): {first}")
    (SITE / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (SITE / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def main() -> int:
    """Build the site; 0 if all is there: the pages in the navigation, the links, the names in the reference."""
    stage()
    unlisted = {page for page in sources().values() if page.suffix == ".md"}
    unlisted -= {page for _, pages in navigation() for page in pages}
    if unlisted:
        print(f"pages that `nav` in mkdocs.yml lacks: {', '.join(sorted(map(str, unlisted)))}", file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=False
    ).returncode
    if built:
        return built
    lost = undocumented()
    if lost:
        print(f"names without an entry in docs/reference: {', '.join(lost)}", file=sys.stderr)
        return 1
    if not search_is_as_known():
        print("the search is another one; adapt docs/javascripts/pasted_errors.js, then this check", file=sys.stderr)
        return 1
    add_texts()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
