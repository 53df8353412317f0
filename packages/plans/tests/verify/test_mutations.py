"""Every plan with one mistake or two, for every generator up to 3 positions and 4 microbatches.

On each of them `verify` and the explorer agree whether anything can go wrong, and what `verify` names is what the
explorer counts. That is 71 million different plans, and needs no more than this:

- Both judge the steps of each position by themselves first, and what is wrong there is wrong whatever the others
  do. In `verify` that is `PositionVerifier`, one per position, and `list_faults` for all that is left; in the explorer
  it is `Part`, and `Explorer.judge`. So each order of steps that up to two mistakes make of one position's is
  judged once by itself, by both; a plan with a wrong one in it is refused by both.
- All plans with no such position are judged whole: two mistakes on one position, and one on each of two.
- Swaps commute, and much that is duplicated is dropped again: equal orders are judged once.

That the parts make up the whole is in the code of both sides, and is tried on a sample of all plans, on which
`verify` and `explore` themselves are called. The whole matrix takes about an hour of one core, nightly, each test
some minutes at most; a slice of it always runs.
"""

from __future__ import annotations

import functools
import itertools
import random
from zlib import crc32

import pytest

from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import step_text
from pipegrid.plans.verify.position import PositionVerifier
from pipegrid.plans.verify.table import Blocking, EventIds, PositionTable
from pipegrid.plans.verify.verify import list_faults
from plan_kit.explorer import NEVER, STUCK, TOO_SOON, TWICE, UNKNOWN, Explorer, Part, explore
from plan_kit.mutations import MODES, Alphabet, rules_broken, single_mutations
from plan_kit.plans import GENERATORS

SIZES = [(p, m) for p in (1, 2, 3) for m in (1, 2, 3, 4)]
SLICES = {(3, 4): 4}  # what is cut into several tests
SAMPLED = 1000  # one in so many plans is judged by `verify` and `explore` themselves
NAMES = {
    "unknown-microbatch": UNKNOWN,
    "duplicate": TWICE,
    "missing": NEVER,
    "dependency": TOO_SOON,
    "late-receive": TOO_SOON,
}


def text(checked):
    """The steps that were checked."""
    return " ".join(map(step_text, checked.steps))


class Judges:
    """Both sides, prepared for plans that differ from ``plan`` in their steps only.

    ``every_order``: the explorer plays the meeting of sound words in every order of events, and not in one only.
    """

    def __init__(self, plan, *, every_order=False):
        self.plan, self.every_order = plan, every_order
        self.alphabet = Alphabet(plan.num_microbatches)
        self.words = [self.alphabet.word(steps) for steps in plan.positions]
        self.ids = EventIds(plan)
        self.tables = {
            (lanes, batches): [
                PositionTable(self.ids, position, Blocking(lanes=lanes, batches=batches))
                for position in range(plan.num_positions)
            ]
            for lanes, batches in MODES
        }
        self.explorers = {mode: Explorer(plan, *mode) for mode in MODES}
        self._read = functools.cache(
            lambda mode, position, letter: self.explorers[mode].read(position, self.alphabet.step(letter))
        )

    def part(self, mode, position, word):
        """What the explorer reads in a word."""
        pieces = [piece for letter in word for piece in self._read(mode, position, letter)]
        return Part(self.explorers[mode], position, pieces)

    def verified(self, mode, position, word):
        """What `verify` finds in a word by itself."""
        return PositionVerifier(self.tables[mode][position], self.alphabet.steps(word))

    def alone(self, position, word):
        """Let both judge a word by itself: as each side reads it in each mode, or None of one with a mistake."""
        first, *others = MODES
        checked, part = self.verified(first, position, word), self.part(first, position, word)
        named = {NAMES[fault.rule] for fault in checked.faults}
        assert named == part.mistakes, (position, checked.faults, part.mistakes, text(checked))
        if named:
            return None
        sound = {mode: (self.verified(mode, position, word), self.part(mode, position, word)) for mode in others}
        return {first: (checked, part), **sound}

    def together(self, sounds):
        """Let both judge a plan of words that are sound by themselves: whether it is right for all lanes."""
        right = True
        for mode in MODES:
            checks, parts = zip(*(sound[mode] for sound in sounds), strict=True)
            named = {fault.rule for fault in list_faults(self.ids, checks)}
            problems = self.explorers[mode].judge(parts)
            if self.every_order:
                assert problems == self.explorers[mode].judge(parts, every_order=True), (mode, [*map(text, checks)])
            wanted = set()
            if self.explorers[mode].crossed(parts):
                wanted = {"order"}
            elif STUCK in problems:
                wanted = {"cycle"}
            assert bool(named) == bool(problems), (mode, named, problems, [*map(text, checks)])
            assert named == wanted, (mode, named, problems, [*map(text, checks)])
            right = right and not named
        return right

    def whole(self, words):
        """Let `verify` and `explore` themselves judge a plan: it comes to what its positions have wrong, and more."""
        plan = self.alphabet.with_words(self.plan, words)
        alone = set().union(*(self.part(MODES[0], p, word).mistakes for p, word in enumerate(words)))
        for lanes, batches in MODES:
            named = rules_broken(plan, (lanes, batches))
            problems = explore(plan, lanes=lanes, batches=batches, every_order=False)
            assert bool(named) == bool(problems), (lanes, named, problems, str(plan))
            if sum(map(len, plan.positions)) < plan.num_microbatches:  # refused before its steps are read
                assert named == {"missing"}, str(plan)
                continue
            assert {NAMES[rule] for rule in named & NAMES.keys()} == alone, (lanes, named, alone, str(plan))
            assert named - NAMES.keys() <= ({"order"} if alone else {"order", "cycle"}), (lanes, str(plan))


def changed(words, position, word):
    """The words with another one at ``position``."""
    return [*words[:position], word, *words[position + 1 :]]


def slice_of(word, slices):
    """In which slice a word is, the same in every process."""
    return crc32(word.encode("utf-16", "surrogatepass")) % slices


def two_on_one_position(judges, number, slices):
    """All plans with up to two mistakes, on one position: how many, and how many are right."""
    originals = [judges.alone(position, word) for position, word in enumerate(judges.words)]
    count = right = 0
    for position, word in enumerate(judges.words):
        singles = {word} | {once for _, once in judges.alphabet.changes(word)}
        doubles = sorted(
            {
                twice
                for single in sorted(singles)
                for _, twice in judges.alphabet.changes(single)
                if slice_of(twice, slices) == number
            }
        )
        for at, twice in enumerate(doubles):
            sound = judges.alone(position, twice)
            count += 1
            if sound is not None:
                right += judges.together(changed(originals, position, sound))
            if at % SAMPLED == 0:
                judges.whole(changed(judges.words, position, twice))
    return count, right


def one_on_each_of_two_positions(judges, number, slices):
    """All plans with a mistake on each of two positions: how many, and how many are right."""
    rng = random.Random(number)
    originals = [judges.alone(position, word) for position, word in enumerate(judges.words)]
    words = [sorted({once for _, once in judges.alphabet.changes(word)} - {word}) for word in judges.words]
    sounds = [
        [sound for word in own if (sound := judges.alone(position, word)) is not None]
        for position, own in enumerate(words)
    ]
    count = right = 0
    for one, two in itertools.combinations(range(len(words)), 2):
        num_pairs = len(range(number, len(words[one]) * len(words[two]), slices))
        for first, second in itertools.islice(itertools.product(sounds[one], sounds[two]), number, None, slices):
            right += judges.together(changed(changed(originals, one, first), two, second))
        for _ in range(num_pairs // SAMPLED + 1):
            judges.whole(changed(changed(judges.words, one, rng.choice(words[one])), two, rng.choice(words[two])))
        count += num_pairs
    return count, right


def check(name, p, m, number, slices):
    """Check one of so many slices of a generator's plans of a size: how many there are, and how many are right."""
    judges = Judges(lower(GENERATORS[name](p, m)), every_order=p <= 2 and m <= 2)
    results = [judge(judges, number, slices) for judge in (two_on_one_position, one_on_each_of_two_positions)]
    return tuple(map(sum, zip(*results, strict=True)))


@pytest.mark.parametrize("name", GENERATORS)
def test_of_any_two_mistakes_a_sample_is_judged_alike(name):
    for p, m, slices in ((2, 1, 8), (3, 2, 240)):
        count, _ = check(name, p, m, len(name) % slices, slices)
        assert count > 10


@pytest.mark.parametrize("slices", [1, 3])
def test_the_slices_together_are_all_plans(slices):
    plan = lower(GENERATORS["gpipe"](2, 1))
    brute = {twice for _, once in single_mutations(plan) for _, twice in single_mutations(once)}
    brute |= {once for _, once in single_mutations(plan)}
    counts = [check("gpipe", 2, 1, number, slices) for number in range(slices)]
    repeated = len(plan.positions) - 1  # the plan itself, as often as there are positions
    assert sum(count for count, _ in counts) - repeated == len(brute)
    right = sum(right for _, right in counts) - repeated
    assert right == sum(not any(rules_broken(mutant, mode) for mode in MODES) for mutant in brute)


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("p", "m", "number", "slices"),
    [
        pytest.param(p, m, number, slices, id=f"{p}x{m}-{number + 1}of{slices}")
        for p, m in SIZES
        for slices in [SLICES.get((p, m), 1)]
        for number in range(slices)
    ],
)
def test_any_two_mistakes_are_judged_alike(name, p, m, number, slices):
    count, right = check(name, p, m, number, slices)
    assert right < count
    assert right or slices > 1  # the plan as it was is one of them
