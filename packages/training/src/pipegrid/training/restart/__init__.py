"""Runs that are stopped, killed and started again: signals, progress, the launcher."""

from pipegrid.training.restart.attempt import Attempt
from pipegrid.training.errors import RestartError
from pipegrid.training.restart.record import (
    NO_PROGRESS,
    PREEMPTED,
    AttemptRecord as AttemptRecord,
    read_attempts as read_attempts,
)
from pipegrid.training.restart.torchelastic import attempt_store, stop_restarts

__all__ = ["NO_PROGRESS", "PREEMPTED", "Attempt", "RestartError", "attempt_store", "stop_restarts"]
