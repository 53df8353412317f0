"""The names of `pipegrid.checkpoint`, which are imported from here as well."""

from pipegrid.checkpoint import *
