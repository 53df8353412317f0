"""The names of `pipegrid.autograd`, which are imported from here as well."""

from pipegrid.autograd import *
from pipegrid.schedules.runtime.stages.offload import Offload as Offload
