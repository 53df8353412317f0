"""The names of `pipegrid.reshard`, which are imported from here as well."""

from pipegrid.reshard import *
