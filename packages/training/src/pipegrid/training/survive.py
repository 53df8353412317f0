"""The names of `pipegrid.survive`, which are imported from here as well."""

from pipegrid.survive import *
