"""Epochs: who lives and what is done, agreed over a control store, so that survivors of a death go on. No torch."""

from pipegrid.monitor.epochs.epochs import Epochs
from pipegrid.monitor.epochs.errors import FencedError, RankLostError
from pipegrid.monitor.epochs.stored_epochs import EpochStore
from pipegrid.monitor.epochs.records import Epoch, VoteResult

__all__ = ["Epoch", "EpochStore", "Epochs", "FencedError", "RankLostError", "VoteResult"]
