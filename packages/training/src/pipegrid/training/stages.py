"""The names of `pipegrid.stages`, which are imported from here as well."""

from pipegrid.stages import *
