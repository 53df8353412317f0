"""Errors of the pool itself, as opposed to the failures of the tests that it runs."""


class PoolError(RuntimeError):
    """The pool cannot provide rank processes: the template or a worker did not start."""
