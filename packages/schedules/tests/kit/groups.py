"""A collection of process groups, as the step functions and the reductions take it."""

from attrs import frozen


@frozen
class Groups:
    dp: object = None
    dp_cp: object = None
    cp: object = None
    tp: object = None
