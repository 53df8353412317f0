"""A step that survives the death of a rank: functions that all living ranks do, and do again where one has died."""

from pipegrid.survive.connections import init_process_group
from pipegrid.survive.errors import RankRetiredError, SurviveError
from pipegrid.survive.handover import Stateful
from pipegrid.survive.kept import KeptState
from pipegrid.survive.living import Living
from pipegrid.survive.redoable import require_redoable
from pipegrid.survive.survivors import Survived, Survivors, World
from pipegrid.survive.world import PipelineJob, PipelineWorld

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
