"""A job on several grids: placement of modules, roles of ranks, data lanes, a description as a table."""
