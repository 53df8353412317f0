"""The errors of this folder."""

from __future__ import annotations


class SurviveError(ValueError):
    """A job that cannot survive a death as it is: modules or groups of which a step cannot be done again.

    Examples:
        >>> require_redoable({}, peers=[0, 1], allow="hook")
        Traceback (most recent call last):
            ...
        pipegrid.survive.errors.SurviveError: allow is 'hook'; it must be a list of names, such as ['hook']
    """


class RankRetiredError(SystemExit):
    """A rank of the same tensor- or context-parallel group has died: this one has no part in the job any more.

    The process ends with exit code 0, as one whose work is done.

    Examples:
        >>> str(RankRetiredError("rank 3"))
        'rank 3'
    """

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self.text = text

    def __str__(self) -> str:
        """The reason, where `SystemExit` has the exit code."""
        return self.text
