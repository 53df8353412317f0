"""The bridge between two modules on grids of their own."""
