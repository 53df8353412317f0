"""The bases of errors, and those of arguments: what, value and rule. No torch."""


class P2PError(RuntimeError):
    """A failure of point-to-point traffic; the base of all errors of it.

    Examples:
        >>> try:
        ...     LaneSpec(3, -1)
        ... except P2PError as error:
        ...     print(error)
        LaneSpec.destination is -1; it must be an integer of at least 0
    """


class P2PUsageError(P2PError, ValueError):
    """A setting, a lane description, a call or a payload that is wrong, or not for this lane, edge, rank or moment.

    Nothing was sent.

    Examples:
        >>> LaneSpec(3, -1)
        Traceback (most recent call last):
            ...
        pipegrid.core.errors.P2PUsageError: LaneSpec.destination is -1; it must be an integer of at least 0
    """


class StepArgumentError(ValueError):
    """An argument of a step function, a runtime or a monitor that is wrong, contradicts another or the plan.

    Examples:
        >>> checked(0, Count, "num_microbatches", StepArgumentError)
        Traceback (most recent call last):
            ...
        pipegrid.core.errors.StepArgumentError: num_microbatches is 0; it must be an integer of at least 1
    """
