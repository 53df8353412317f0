"""The errors of boundaries between grids. No torch."""


class BridgeError(ValueError):
    """Sides, samples, stages or copies that do not fit each other; the base of the errors of bridges.

    Also a call that this rank, an edge or the state of a step does not have: an edge, a stage, a side or a verb of
    other ranks; a gradient, or an activation that requires one, on an edge without backward; a gradient for which no
    activation is in flight.

    Examples:
        >>> Shard("b", order="zigzag")
        Traceback (most recent call last):
            ...
        pipegrid.reshard.errors.BridgeError: Shard('b').order is 'zigzag'; replicas are contiguous blocks
    """


class ShapeError(BridgeError):
    """A tensor whose dtype, number of axes or shape is not what the edge carries.

    Examples:
        >>> Sizes((6, 16), axes=axis_names(3))
        Traceback (most recent call last):
            ...
        pipegrid.reshard.errors.ShapeError: shape (6, 16) has 2 axes, the edge names (('b',), ('s',), ('h',))
    """
