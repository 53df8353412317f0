"""The names of `pipegrid.monitor`, which are imported from here as well."""

from pipegrid.monitor import *
from pipegrid.schedules.speeds import (
    SlowRank as SlowRank,
    UnitSeconds as UnitSeconds,
    measured_speeds as measured_speeds,
    slow_ranks as slow_ranks,
)
