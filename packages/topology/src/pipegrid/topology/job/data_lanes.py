"""Names of `replicas` until this version: a replica was called a data lane."""

from pipegrid.topology.job.replicas import (
    replica_bounds as lane_bounds,
)
from pipegrid.topology.job.replicas import (
    replica_of as data_lane,
)
from pipegrid.topology.job.replicas import (
    replica_samples as lane_samples,
)
from pipegrid.topology.job.replicas import (
    replica_sizes as lane_sizes,
)

__all__ = ["data_lane", "lane_bounds", "lane_samples", "lane_sizes"]
