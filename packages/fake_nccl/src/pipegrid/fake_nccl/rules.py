"""Settings of torch's watchdogs: of ``nccl-legacy``, and of torch 2.15's ``nccl``."""

from __future__ import annotations

from attrs import frozen


@frozen
class LegacyRules:
    """Settings of the watchdog and the heartbeat monitor of ``nccl-legacy``.

    The error of an entry ends the process ``grace`` seconds later, unless its group was aborted by then. The watchdog
    then sets the key ``exception_dump`` in the store; a process that finds the key, of an earlier attempt of the job as
    well, ends ``dump_grace`` seconds later. Each of these fails the test.

    Attributes:
        grace: seconds from an error to the end of the process.
        handling: ``TORCH_NCCL_ASYNC_ERROR_HANDLING``; with 0 an error ends nothing.
        dump_grace: seconds from a look that finds the dump key in the store to the end of the process.

    Examples:
        >>> LegacyRules(handling=0).grace
        60.0
    """

    grace: float = 60.0
    handling: int = 3
    dump_grace: float = 480.0


@frozen
class Nccl2Rules:
    """Settings of the watchdog of nccl2 and nccl-lazy, whose rules `Nccl2Group` has.

    Attributes:
        tick: seconds between its looks.
        grace: seconds from a look that sees an error to the end of the process.
        handling: ``TORCH_NCCL_ASYNC_ERROR_HANDLING``; with 0 it ends nothing.

    Examples:
        >>> FakeDevice(nccl2=Nccl2Rules(tick=0.1)).nccl2.tick
        0.1
    """

    tick: float = 1.0
    grace: float = 15.0
    handling: int = 3
