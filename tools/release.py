"""Set the one version of all packages: `python tools/release.py 0.2.0`.

Rewrites every packages/*/pyproject.toml (its own version, and what it requires of its siblings) and CITATION.cff.
The tests in tools/tests/test_versions.py hold the packages, their requirements, changelog and citation together.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def set_version(text: str, version: str) -> str:
    """``text`` of a pyproject.toml with its version and its pins on sibling packages replaced."""
    text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text, count=1)
    return re.sub(r'"(pipegrid-[a-z]+)==[^"]+"', rf'"\1=={version}"', text)


def main() -> None:
    """Rewrite the packages' metadata and say what changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="for example 0.2.0")
    version: str = parser.parse_args().version
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        parser.error(f"{version!r} is no version; expected MAJOR.MINOR.PATCH with an optional aN, bN or rcN")
    citation = ROOT / "CITATION.cff"
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {version}", citation.read_text()))
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        path.write_text(set_version(path.read_text(), version))
        print(f"{path.relative_to(ROOT)}: {version}")


if __name__ == "__main__":
    main()
