"""A step that survives the death of a rank: functions that all living ranks do, and do again where one has died."""

from pipegrid.training.survive.default_group import init_process_group
from pipegrid.training.survive.errors import RankRetiredError, SurviveError
from pipegrid.training.survive.events import Survived
from pipegrid.training.survive.handover import Stateful
from pipegrid.training.survive.kept import KeptState
from pipegrid.training.survive.living import Living
from pipegrid.training.survive.redoable import require_redoable
from pipegrid.training.survive.survivors import Survivors
from pipegrid.training.survive.world import PipelineJob, PipelineWorld
from pipegrid.training.survive.worlds import World

__all__ = [
    "KeptState",
    "Living",
    "PipelineJob",
    "PipelineWorld",
    "RankRetiredError",
    "Stateful",
    "SurviveError",
    "Survived",
    "Survivors",
    "World",
    "init_process_group",
    "require_redoable",
]
