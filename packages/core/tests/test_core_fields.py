"""Rules of annotations are checked where data is made."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.fields import (
    Amount,
    Count,
    Index,
    Name,
    Seconds,
    checked,
    checked_arguments,
    checked_fields,
    integer,
    nearest,
)


class JobError(ValueError):
    pass


@attrs.frozen(field_transformer=checked_fields(JobError))
class Job:
    stages: Count
    name: Name = "job"
    ranks: tuple[Index, ...] = ()
    lanes: Literal["separate", "shared"] = "separate"
    limit: Amount | None = None
    deadline: Seconds = 1.0
    parent: "Job | None" = None
    other: Any = None
    depth: Annotated[int, integer(2, 4)] = 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": 0}, "Job.stages is 0; it must be an integer of at least 1"),
        ({"stages": True}, "Job.stages is True; it must be an integer of at least 1"),
        ({"stages": 2.0}, "Job.stages is 2.0; it must be an integer of at least 1"),
        ({"stages": None}, "Job.stages is None; it must be an integer of at least 1"),
        ({"stages": torch.tensor(True)}, r"Job.stages is tensor\(True\) \(Tensor\); it must be an integer"),
        ({"stages": 1, "name": ""}, "Job.name is ''; it must be a string that is not empty"),
        ({"stages": 1, "ranks": (1, -1)}, r"Job.ranks\[1\] is -1; it must be an integer of at least 0"),
        ({"stages": 1, "ranks": "12"}, "Job.ranks is '12'; it must be a list or tuple"),
        ({"stages": 1, "ranks": {1}}, "Job.ranks is {1}"),
        ({"stages": 1, "ranks": torch.tensor(1)}, r"Job.ranks is tensor\(1\)"),
        ({"stages": 1, "lanes": "both"}, "Job.lanes is 'both'; it must be 'separate' or 'shared'"),
        ({"stages": 1, "limit": -1}, "Job.limit is -1; it must be a finite number of at least 0"),
        ({"stages": 1, "limit": math.nan}, "Job.limit is nan"),
        ({"stages": 1, "limit": 10**400}, "Job.limit is 1000"),
        ({"stages": 1, "limit": "5"}, "Job.limit is '5'"),
        ({"stages": 1, "deadline": 0}, "Job.deadline is 0; it must be a finite number above 0"),
        ({"stages": 1, "depth": 5}, "Job.depth is 5; it must be an integer of 2 to 4"),
    ],
)
def test_a_field_that_breaks_its_rule_raises_the_class_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=f"^{text}"):
        Job(**arguments)


def test_values_take_their_one_form() -> None:
    job = Job(torch.tensor(3), ranks=range(2), limit=Fraction(1, 2), parent=Job(1))
    assert (type(job.stages), job.stages) == (int, 3)
    assert job.ranks == (0, 1)
    assert job.limit == 0.5
    assert Job(1).limit is None


def test_evolve_checks_again() -> None:
    with pytest.raises(JobError, match=r"Job\.stages"):
        attrs.evolve(Job(2), stages=-1)


@given(st.integers() | st.floats() | st.text() | st.none() | st.booleans() | st.lists(st.integers()))
def test_a_count_is_an_int_of_at_least_one_or_an_error(value: object) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    try:
        assert checked(value, Count, "n", JobError) == value
    except JobError:
        assert not valid
    else:
        assert valid


NAMES = ("gpipe", "1f1b", "interleaved_zero_bubble", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "v_min")


@given(st.sampled_from(NAMES), st.integers(0, 30), st.sampled_from(["drop", "double", "upper"]))
def test_a_name_with_a_slip_is_suggested(name, at, slip):
    at %= len(name)
    wrong = {"drop": name[:at] + name[at + 1 :], "double": name[: at + 1] + name[at:], "upper": name.upper()}[slip]
    if wrong not in NAMES and not wrong.startswith("zero_bubble_"):
        assert nearest(wrong, NAMES) == f" (did you mean {name!r}?)"


def test_abbreviations_are_suggested_and_other_words_are_not():
    assert nearest("zbv", NAMES) == nearest("ZB-V", NAMES) == " (did you mean 'zero_bubble_v'?)"
    assert nearest("zb-h1", NAMES) == " (did you mean 'zero_bubble_h1'?)"
    assert nearest("izb", NAMES) == " (did you mean 'interleaved_zero_bubble'?)"
    assert nearest("something", NAMES) == nearest(3, NAMES) == nearest("", NAMES) == nearest("x", ()) == ""
    with pytest.raises(JobError, match=r"^lanes is 'seperate' \(did you mean 'separate'\?\); it must be"):
        launch(stages=1, lanes="seperate")


@checked_arguments(JobError)
def launch(stages: Count, *, lanes: Literal["separate", "shared"] = "separate", other: Any = None) -> Any:
    """Launch."""
    return stages, lanes, other


def test_arguments_of_a_function_are_brought_into_their_one_form():
    assert launch(torch.tensor(2), other=[3]) == (2, "separate", [3])
    assert type(launch(torch.tensor(2))[0]) is int
    assert launch.__doc__ == "Launch."
    with pytest.raises(JobError, match="^stages is 0; it must be an integer of at least 1$"):
        launch(0)
    with pytest.raises(JobError, match="^lanes is 'both'; it must be 'separate' or 'shared'$"):
        launch(stages=1, lanes="both")
    with pytest.raises(TypeError, match=r"launch\(\) missing .*'stages'"):
        launch()
    with pytest.raises(TypeError, match=r"launch\(\) takes 1 positional argument but 2"):
        launch(1, "shared")


@checked_arguments(JobError, kinds=True)
def lay_out(
    job: Job | None = None,
    *,
    flag: bool = False,
    name: str | None = None,
    names: Iterable[str] = (),
    jobs: Mapping[str, Job] | None = None,
    then: Callable[[], None] | Job | None = None,
    series: str | Sequence[str] = "",
) -> Any:
    return job, flag, name, names, jobs, then, series


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"job": 3}, "job is 3; it must be a Job"),
        ({"job": Job}, r"job is <class .* \(type\); it must be a Job"),
        ({"flag": "no"}, "flag is 'no'; it must be True or False"),
        ({"flag": 1}, "flag is 1; it must be True or False"),
        ({"flag": torch.ones(2)}, r"flag is tensor\(.*; it must be True or False"),
        ({"name": b"x"}, r"name is b'x' \(bytes\); it must be a string"),
        ({"names": "tp"}, "names is 'tp'; it must be a list or tuple"),
        ({"names": None}, "names is None; it must be a list or tuple"),
        ({"names": torch.tensor(2)}, r"names is tensor\(2\) \(Tensor\); it must be a list or tuple"),
        ({"names": ["tp", 2]}, r"names\[1\] is 2; it must be a string"),
        ({"jobs": [Job(1)]}, r"jobs is \[Job.*; it must be a mapping"),
        ({"jobs": {"a": None}}, r"jobs\['a'\] is None; it must be a Job"),
        ({"then": "x"}, "then is 'x'; it must be a function or another callable or a Job"),
        ({"series": 3}, "series is 3; it must be a string or a list or tuple"),
    ],
)
def test_an_argument_of_another_class_than_its_annotation_is_the_functions_error(arguments, text):
    with pytest.raises(JobError, match=f"^{text}$"):
        lay_out(**arguments)


def test_an_argument_of_its_annotations_class_stays_as_it_is():
    job, names, jobs = Job(1), (each for each in "ab"), {"a": Job(2)}
    given = (job, True, "x", names, jobs, print, ["tp"])
    named = dict(zip(("flag", "name", "names", "jobs", "then", "series"), given[1:], strict=True))
    assert all(one is other for one, other in zip(lay_out(job, **named), given, strict=True))
    assert lay_out(flag=torch.tensor(True))[1] is True
