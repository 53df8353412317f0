"""Names of `replicas` until this version: a replica was called a data lane."""

from __future__ import annotations

from pipegrid.topology.job.replicas import replica_bounds, replica_of, replica_samples, replica_sizes

data_lane, lane_samples = replica_of, replica_samples


def lane_bounds(num_samples: int, lanes: int) -> tuple[int, ...]:
    """`replica_bounds`, with the name of its argument until this version."""
    return replica_bounds(num_samples, lanes)


def lane_sizes(num_samples: int, lanes: int) -> tuple[int, ...]:
    """`replica_sizes`, with the name of its argument until this version."""
    return replica_sizes(num_samples, lanes)


__all__ = ["data_lane", "lane_bounds", "lane_samples", "lane_sizes"]
