"""Process groups, and collections of them, as the step functions and the reductions take them."""

from attrs import frozen


@frozen
class Group:
    """A process group as far as its size, seen by its first rank."""

    ranks: int

    def size(self):
        return self.ranks

    def rank(self):
        return 0


@frozen
class Groups:
    dp: object = None
    dp_cp: object = None
    cp: object = None
    tp: object = None
