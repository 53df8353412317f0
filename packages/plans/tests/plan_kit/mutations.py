"""Plans with mistakes in them: each way in which a hand could get a table wrong, alone or several at once.

Steps are letters of an `Alphabet`, and what a position does is a word: quick to change, to compare and to hash.
"""

from __future__ import annotations

import functools

from attrs import evolve

from pipegrid.plans import PlanError, actions_of, verify

# The rules of lanes and batches, as `verify` takes them.
MODES = (("separate", "in_order"), ("separate", "simultaneous"), ("shared", "simultaneous"))


def rules_broken(plan, mode):
    """The rules that `verify` finds broken."""
    lanes, batches = mode
    try:
        verify(plan, lanes=lanes, batches=batches)
    except PlanError as error:
        return {fault.rule for fault in error.faults} or {"unnamed"}
    return set()


class Alphabet:
    """A letter for each step of a plan of that shape, and for each that a mistake can make of it."""

    def __init__(self, num_microbatches, num_slices=1, *, pairs=False):
        self.num_microbatches, self.num_slices, self.pairs = num_microbatches, num_slices, pairs
        self._letters = {}
        self._steps = {}

    def letter(self, actions):
        """The letter of a step, given as its actions; none for none."""
        if not actions:
            return ""
        if actions not in self._letters:
            self._letters[actions] = chr(ord("A") + len(self._letters))
            self._steps[self._letters[actions]] = actions if len(actions) > 1 else actions[0]
        return self._letters[actions]

    def word(self, steps):
        """A position's steps as a word."""
        return "".join(self.letter(actions_of(step)) for step in steps)

    def step(self, letter):
        """The step that a letter stands for."""
        return self._steps[letter]

    def steps(self, word):
        """The steps that a word stands for."""
        return tuple([self._steps[letter] for letter in word])

    def with_words(self, plan, words):
        """``plan`` with these steps in place of its own."""
        return evolve(plan, positions=tuple(map(self.steps, words)))

    def actions(self, letter):
        """The actions of a step."""
        return actions_of(self._steps[letter])

    @functools.cache  # noqa: B019 -- lives as long as the alphabet, which goes with its test
    def replacements(self, letter):
        """What one mistake makes of a step, as (what, the letters in its place)."""
        batch, found = self.actions(letter), []
        for a, action in enumerate(batch):
            rest = (*batch[:a], *batch[a + 1 :])
            found.append((("drop", action), self.letter(rest)))
            found.append((("duplicate", action), letter + self.letter((action,))))
            if rest:
                found.append((("unbatch", action), self.letter((action,)) + self.letter(rest)))
            for microbatch in range(self.num_microbatches + 1) if action.microbatch is not None else ():
                if microbatch != action.microbatch:
                    other = (*batch[:a], evolve(action, microbatch=microbatch), *batch[a + 1 :])
                    found.append((("renumber", action, microbatch), self.letter(other)))
            for part in range(self.num_slices) if action.slice is not None else ():
                if part != action.slice:
                    other = (*batch[:a], evolve(action, slice=part), *batch[a + 1 :])
                    found.append((("renumber slice", action, part), self.letter(other)))
        return found

    @functools.cache  # noqa: B019
    def batch(self, letter, other):
        """The letter of two steps issued together, or none if one is not of messages alone, nor they a pair."""
        both = (*self.actions(letter), *self.actions(other))
        paired = self.pairs and [str(action.kind) for action in both] in (["F", "B"], ["F", "I"])
        return self.letter(both) if paired or all(action.kind.is_message for action in both) else ""

    @functools.cache  # noqa: B019
    def receives(self, letter):
        """Whether a step does nothing but receive."""
        return all(action.kind.is_receive for action in self.actions(letter))

    def changes(self, word):
        """Every word that is one mistake away, as (what, word); what is a verb and the letters or actions concerned."""
        for i, letter in enumerate(word):
            before, after = word[:i], word[i + 1 :]
            for j in range(i + 1, len(word)):
                what = ("flip" if j == i + 1 else "swap", letter, word[j])
                yield what, before + word[j] + word[i + 1 : j] + letter + word[j + 1 :]
            for what, instead in self.replacements(letter):
                yield what, before + instead + after
            if self.receives(letter):
                left = before + after
                for j in range(len(word)):
                    if j != i:
                        yield ("move", letter, j), left[:j] + letter + left[j:]
            if after and (both := self.batch(letter, after[0])):
                yield ("batch", both), before + both + after[1:]
            if self.pairs and after and (both := self.batch(after[0], letter)):
                yield ("batch backwards", both), before + both + after[1:]

    def describe(self, what):
        """A mistake in words."""
        return " ".join(
            str(self._steps[part]) if isinstance(part, str) and part in self._steps else str(part) for part in what
        )


def single_mutations(plan, *, pairs=False):
    """Every plan that differs from ``plan`` by one mistake, as (what it is, plan); ``pairs`` are made of computes."""
    alphabet = Alphabet(plan.num_microbatches, plan.num_slices, pairs=pairs)
    words = [alphabet.word(steps) for steps in plan.positions]
    for position, word in enumerate(words):
        for what, changed in alphabet.changes(word):
            mutant = alphabet.with_words(plan, [*words[:position], changed, *words[position + 1 :]])
            yield alphabet.describe(what), mutant


def random_mutant(plan, rng, count, *, pairs=False):
    """``plan`` with ``count`` random mistakes, as (what they are, plan).

    Each kind of mistake is as likely as every other, however many places there are for it.
    """
    alphabet = Alphabet(plan.num_microbatches, plan.num_slices, pairs=pairs)
    words = [alphabet.word(steps) for steps in plan.positions]
    mistakes = []
    for _ in range(count):
        position = rng.randrange(plan.num_positions)
        kinds = {}
        for what, changed in alphabet.changes(words[position]):
            kinds.setdefault(what[0], []).append((what, changed))
        if kinds:
            what, words[position] = rng.choice(kinds[rng.choice(sorted(kinds))])
            mistakes.append(alphabet.describe(what))
    return mistakes, alphabet.with_words(plan, words)
