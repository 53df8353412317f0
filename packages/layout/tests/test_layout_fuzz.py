"""No text crashes or hangs the parser: each is read, or is an error at a column inside the text."""

from __future__ import annotations

import random

import pytest

from pipegrid.layout import LayoutSyntaxError, PipelineParallelLayerLayout

CORPUS = [
    "",
    "Et*3|(tt|)*29,m|L",
    "E||t|L",
    "(t|t)*2",
    "((t|)*2m|)*2",
    "Et|(tt|)*29|L",
    " E t * 3 |\n(tt|) * 2 ,\tL ",
    "E(t*12|)*0(t|)*7mL",
    "((((t*9)*9)*9)*9)*9|L",
    "|*1000,(|*1000)*1000",
    "E|t*2*3|(tt|)*2 * 2 L",
    "t*1000001",
    "(" * 20 + "t" + ")*2" * 20,
]
ALPHABET = "EetmL|,*()0123456789 \t\n" * 3 + "xXv-+.;²٣\u00a0\u200b\ud800\U0001f600日\0"


def mutate(rng: random.Random, text: str) -> str:
    """Change a few places: insert, delete, replace, double a part, or splice in a part of another text."""
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(text))
        part = text[at : at + rng.randint(0, 8)]
        other = rng.choice(CORPUS)
        start = rng.randint(0, len(other))
        new = (
            rng.choice(ALPHABET) + part,
            "",
            "".join(rng.choices(ALPHABET, k=len(part))),
            part * rng.randint(2, 5),
            other[start : start + rng.randint(0, 12)] + part,
        )
        text = text[:at] + rng.choice(new) + text[at + len(part) :]
    return text[:200]


def parse(text: str) -> list[list[str]] | LayoutSyntaxError:
    """The stages of a text, or its error; any other exception fails the test."""
    try:
        return PipelineParallelLayerLayout.parse_str_to_list(text)
    except LayoutSyntaxError as error:
        return error


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Parse ``count`` mutated texts; returns the numbers of layouts and of errors."""
    rng = random.Random(seed)
    pool = list(CORPUS)
    read = errors = 0
    for _ in range(count):
        text = mutate(rng, rng.choice(pool))
        result = parse(text)
        if isinstance(result, LayoutSyntaxError):
            errors += 1
            assert result.text == text
            assert 0 <= result.column < len(text), (text, result.column)
            assert result.found, text
            assert result.expected, text
            assert len(str(result).splitlines()) == 3, text
        else:
            read += 1
            assert 1 <= len(result) <= 1_000_000, text
            if len(result) < 1000:
                layout = PipelineParallelLayerLayout(text, 1)
                assert PipelineParallelLayerLayout(str(layout), 1) == layout, text
        # Mutations of mutations wander far; errors are kept, too, but not so many that few are read, and no text
        # that takes a second to expand.
        if (
            rng.random() < 0.1
            if isinstance(result, LayoutSyntaxError)
            else sum(map(len, result)) + len(result) < 20_000
        ):
            if len(pool) < 300:
                pool.append(text)
            else:
                pool[rng.randrange(len(CORPUS), len(pool))] = text
    return read, errors


def test_mutated_texts_are_read_or_errors_at_a_column():
    read, errors = fuzz(20_000, seed=1)
    assert min(read, errors) > 1000  # the mutations reach both ends


@pytest.mark.nightly
def test_a_million_mutated_texts():
    read, errors = fuzz(1_000_000, seed=2)
    assert min(read, errors) > 50_000, (read, errors)
