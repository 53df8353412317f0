"""A hook of mkdocs: the README of each package is a page of the site, ``packages/NAME.md``."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the READMEs, with their links into ``docs/`` as links between pages."""
    root = Path(config.docs_dir).parent
    for readme in sorted(root.glob("packages/*/README.md")):
        content = readme.read_text(encoding="utf-8").replace("](../../docs/", "](../")
        files.append(File.generated(config, f"packages/{readme.parent.name}.md", content=content))
    return files
