"""The names of `pipegrid.gradients`, which are imported from here as well."""

from pipegrid.gradients import *
from pipegrid.plans import with_reduce as with_reduce
