"""Verdicts on files as JUnit XML, which CI services show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


@frozen
class Case:
    """A question (``asked``) about a ``file``: a proof, an order model; with the answer, and its outcome."""

    file: str
    asked: str
    text: str
    outcome: Literal["proved", "failure", "error"]


def write_junit(cases: Sequence[Case], path: Path) -> None:
    """Write a test suite with a case for each question; a fault is a failure, a file that is not read an error."""
    counts = {f"{name}s": sum(case.outcome == name for case in cases) for name in ("failure", "error")}
    counts["tests"] = len(cases)
    suite = ET.Element("testsuite", {"name": "pipegrid verify"} | {name: str(count) for name, count in counts.items()})
    for case in cases:
        element = ET.SubElement(suite, "testcase", classname=_plain(case.file), name=_plain(case.asked))
        text = _plain(case.text)
        if case.outcome == "proved":
            ET.SubElement(element, "system-out").text = text
        else:
            ET.SubElement(element, case.outcome, message=text.partition("\n")[0]).text = text
    top = ET.Element("testsuites")
    top.append(suite)
    ET.indent(top)
    ET.ElementTree(top).write(path, encoding="utf-8", xml_declaration=True)


def _plain(text: str) -> str:
    """Text without the characters that XML cannot have."""
    return _NOT_XML.sub("\ufffd", text)
