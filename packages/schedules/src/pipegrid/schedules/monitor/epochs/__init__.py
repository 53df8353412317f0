"""Epochs: who lives and what is done, agreed over a control store, so that survivors of a death go on. No torch."""

from pipegrid.schedules.monitor.epochs.epochs import Epochs
from pipegrid.schedules.monitor.epochs.errors import FencedError, RankLostError
from pipegrid.schedules.monitor.epochs.ledger import EpochStore
from pipegrid.schedules.monitor.epochs.records import Epoch, Verdict

__all__ = ["Epoch", "EpochStore", "Epochs", "FencedError", "RankLostError", "Verdict"]
