"""A step that survives the death of a rank: what it needs to be done again by the ranks that live."""

from pipegrid.training.survive.connections import end_connections
from pipegrid.training.survive.errors import RankRetiredError, SurviveError
from pipegrid.training.survive.kept import KeptState
from pipegrid.training.survive.living import Living
from pipegrid.training.survive.redoable import require_redoable

__all__ = ["KeptState", "Living", "RankRetiredError", "SurviveError", "end_connections", "require_redoable"]
