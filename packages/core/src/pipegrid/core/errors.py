"""The bases of errors, and those of arguments: what, value and rule. No torch."""


class P2PError(RuntimeError):
    """A failure of point-to-point traffic; the base of all errors of it.

    Examples:
        >>> issubclass(P2PUsageError, P2PError), issubclass(P2PUsageError, ValueError)
        (True, True)
    """


class P2PUsageError(P2PError, ValueError):
    """A setting, a lane description, a call or a payload that is wrong, or not for this lane, edge, rank or moment.

    Nothing was sent.
    """


class StepArgumentError(ValueError):
    """An argument of a step function, a runtime or a monitor that is wrong, contradicts another or the plan."""
