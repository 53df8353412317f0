"""A job on several grids: placement of modules, roles of ranks, replicas, a description as a table."""
