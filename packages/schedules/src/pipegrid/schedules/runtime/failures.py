"""The texts of failures: an error in one line, and the first failure inside of the errors that it caused elsewhere.

A rank that fails passes its failure on through the lanes, as the reason for which they end. Whatever error wraps that
reason on another rank, the mark in front of it lets the first failure come first there, too.
"""

from __future__ import annotations

_MARK = "first failure: "
_LONGEST = 500


def line_of(error: BaseException) -> str:
    """An error in one line, with its type: also one whose ``str()`` raises."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 -- a broken error must not hide the step's failure
        text = f"(its text is not known: str() of it raised {type(broken).__name__})"
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def marked(reason: str) -> str:
    """A failure in a form in which `relayed` finds it again."""
    return f"{_MARK}{reason.splitlines()[0][:_LONGEST]}"


def relayed(text: str) -> str | None:
    """The first failure that ``text`` passes on, None if it passes none on."""
    _, mark, cause = text.rpartition(_MARK)
    return cause if mark else None


def without(text: str) -> str:
    """``text`` without the failure that it passes on."""
    return text.partition(_MARK)[0].rstrip(": (")
