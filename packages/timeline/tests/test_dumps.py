"""Flight-recorder dumps: four published hangs, hangs made by hand, places in a plan, and files that are none."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from pathlib import Path

import pytest

from pipegrid.plans import interleaved_1f1b, lower, one_f_one_b, to_text, v_half
from pipegrid.plans.errors import PlanError
from pipegrid.timeline.__main__ import main
from pipegrid.timeline.dumps import DumpError, explain, read_dump, read_dumps, read_records

DATA = Path(__file__).parent / "data"
CASES = sorted(path.stem for path in DATA.glob("*.json"))
SURE = ("certain", "likely")


def case(name):
    found = json.loads((DATA / f"{name}.json").read_text())
    return {int(rank): dump for rank, dump in found["dumps"].items()}, set(found["faulty"])


def written(folder, dumps, form=pickle.dumps):
    for rank, dump in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(form(dump))
    return folder


def explained(folder, dumps):
    return explain(*read_dumps([written(folder, dumps)]))


def named(found, *confidences):
    return {root.rank for root in found.roots if not confidences or root.confidence in confidences}


# ---- Published hangs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", [pickle.dumps, lambda dump: json.dumps(dump).encode()], ids=["pickle", "json"])
def test_the_faulty_ranks_and_no_others_are_named(name, form, tmp_path):
    dumps, faulty = case(name)
    found = explain(*read_dumps([written(tmp_path, dumps, form)]))
    assert named(found) == named(found, *SURE) == faulty
    assert found.cycles == found.missing == found.files == ()
    assert not found.disagreements


def relabelled(dumps, new):
    """The same job with other numbers for its ranks; messages name ranks of their group, by place."""
    changed = {}
    for rank, dump in dumps.items():
        groups = {
            name: {**group, "ranks": str([new[one] for one in json.loads(group["ranks"])])}
            for name, group in dump["pg_config"].items()
        }
        changed[new[rank]] = {**dump, "pg_config": groups}
    return changed


@pytest.mark.parametrize("name", CASES)
def test_they_are_under_other_numbers_of_ranks(name, tmp_path):
    dumps, faulty = case(name)
    new = random.Random(name).sample(range(16), 16)
    assert named(explained(tmp_path, relabelled(dumps, new))) == {new[rank] for rank in faulty}


UNKNOWN = {("gpu_error_1st", (13, 15))}
"""The only ranks that share a pair of tensor parallelism with the faulty ones, and had finished what those had not."""


def check_without(name, pair, found, faulty):
    """Each faulty rank with a dump is named, of the others none surely; one without is named as possible."""
    sure = named(found, *SURE)
    assert sure <= faulty
    assert (name, pair) in UNKNOWN or faulty - set(pair) <= sure
    assert faulty & set(pair) <= named(found)
    assert named(found) - faulty <= set(pair)
    assert found.missing == pair


@pytest.mark.parametrize("name", CASES)
def test_they_are_without_any_two_of_the_dumps(name, tmp_path):
    dumps, faulty = case(name)
    read, _ = read_dumps([written(tmp_path, dumps)])
    for pair in itertools.combinations(range(16), 2):
        check_without(name, pair, explain([dump for dump in read if dump.rank not in pair]), faulty)


@pytest.mark.parametrize("name", CASES)
def test_they_are_where_two_of_the_files_are_cut(name, tmp_path):
    dumps, faulty = case(name)
    pair = tuple(sorted(random.Random(f"{name} cut").sample(range(16), 2)))
    written(tmp_path, dumps)
    for rank in pair:
        file = tmp_path / f"nccl_trace_rank_{rank}"
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    found = explain(*read_dumps([tmp_path]))
    check_without(name, pair, found, faulty)
    assert all("it is cut" in text and ", byte " in text for text in found.files)
    assert len(found.files) == 2


# ---- Hangs made by hand


def entry(number, kind, sequence, group="0", *, state="scheduled", sizes=(4,), dtype="Float"):
    p2p = kind.startswith(("send", "recv"))
    return {
        "record_id": number,
        "process_group": (group, "a group"),
        "profiling_name": f"nccl:{kind}",
        "collective_seq_id": 0 if p2p else sequence,
        "p2p_seq_id": sequence if p2p else 0,
        "input_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "output_sizes": [list(sizes)],
        "output_dtypes": [dtype],
        "state": state,
        "time_created_ns": number,
        "is_p2p": p2p,
    }


def job(rows, groups=None):
    """Dumps of ranks, each with its (kind, state) in one group, or its entries."""
    groups = groups or {"0": list(range(len(rows)))}
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()}
    return {
        rank: {"version": "2.10", "pg_config": config, "entries": [entry(i, *one) for i, one in enumerate(row)]}
        for rank, row in enumerate(rows)
    }


def test_ranks_that_send_to_each_other_first_are_a_cycle(tmp_path):
    found = explained(tmp_path, job([[("send 0->1", 1), ("recv 0<-1", 2)], [("send 1->0", 1), ("recv 1<-0", 2)]]))
    assert found.roots == ()
    ((first, second),) = found.cycles
    assert str(found).splitlines()[:3] == [
        "deadlock: ranks 0, 1 wait for each other in a cycle",
        (
            "  rank 0 at send 1 to rank 1 of group 0 waits for rank 1, "
            "which launched it behind send 1 to rank 0 of group 0"
        ),
        (
            "  rank 1 at send 1 to rank 0 of group 0 waits for rank 0, "
            "which launched it behind send 1 to rank 1 of group 0"
        ),
    ]
    assert (first.rank, second.rank) == (0, 1)


def test_a_wait_says_since_when(tmp_path):
    rows = job([[("all_reduce", 7)], []])
    rows[0]["entries"][0]["time_created_ns"] = 1_700_000_000_123_456_789
    assert "rank 0 at all_reduce 7 of group 0 since 2023-11-14 22:13:20.123 UTC waits for rank 1" in str(
        explained(tmp_path, rows)
    )


def test_messages_of_one_call_are_not_behind_each_other(tmp_path):
    batched = job([[("send 0->1", 1), ("recv 0<-1", 1)], [("send 1->0", 1), ("recv 1<-0", 1)]])
    assert not explained(tmp_path, batched).waits


def test_a_rank_behind_a_root_is_no_root(tmp_path):
    rows = [
        [("send 0->1", 1)],
        [("recv 1<-2", 1), ("recv 1<-0", 2)],
        [
            (
                "all_reduce",
                7,
                "0",
            )
        ],
        [],
    ]
    found = explained(tmp_path, job(rows))
    assert named(found) == {3}
    assert [(root.confidence, root.waiting) for root in found.roots] == [("likely", 3)]
    assert found.empty == (3,)


def test_groups_of_one_name_and_other_ranks_are_not_mixed(tmp_path):
    dumps = job([[("all_reduce", 1)], [], [("all_reduce", 1)], [("all_reduce", 1)]])
    for rank, dump in dumps.items():
        dump["pg_config"] = {"0": {"desc": "", "ranks": "[0, 1]" if rank < 2 else "[2, 3]"}}
    assert named(explained(tmp_path, dumps)) == {1}


def test_other_kinds_and_sizes_of_one_collective_are_told(tmp_path):
    rows = [[("all_reduce", 1), ("all_reduce", 2)], [("broadcast", 1), ("all_reduce", 2)]]
    dumps = job(rows)
    dumps[1]["entries"][1] |= {"input_sizes": [[8]]}
    found = explained(tmp_path, dumps)
    assert found.disagreements == (
        "collective 1 of group 0: rank 0 launched all_reduce, rank 1 launched broadcast",
        (
            "collective 2 of group 0: rank 0 passed [[4]] ['Float'], [[4]] ['Float'], "
            "rank 1 passed [[8]] ['Float'], [[4]] ['Float']"
        ),
    )


def test_nothing_that_waits_is_said(tmp_path):
    assert str(explained(tmp_path, job([[("all_reduce", 1)], [("all_reduce", 1)]]))).startswith(
        "no rank waits for another"
    )


# ---- Where ranks stand in a plan


def dumps_of(plan, ended, *, launched=2, steps=1, first=0):
    """Dumps of a job that ran ``plan``, each rank with so many of its messages ended and some under way."""
    rows = []
    for position in range(plan.num_positions):
        sends = [action for action in plan.actions(position) if action.kind.is_message] * steps
        row = []
        for number, action in enumerate(sends[: ended[position] + launched]):
            peer = plan.placement[action.peer][0]
            kind = f"send {position}->{peer}" if action.kind.is_send else f"recv {position}<-{peer}"
            row.append((kind, number, "0", "completed" if number < ended[position] else "scheduled"))
        rows.append(row)
    dumps = job([[one[:3] for one in row] for row in rows])
    for rank, row in enumerate(rows):
        for one, (_, number, _, state) in zip(dumps[rank]["entries"], row, strict=True):
            one |= {"state": state, "record_id": number + first}
        dumps[rank]["entries"] = dumps[rank]["entries"][first:]
    return dumps


@pytest.mark.parametrize(
    "plan", [lower(v_half(4, 8)), lower(one_f_one_b(4, 8)), lower(interleaved_1f1b(2, 4, num_chunks=2))]
)
def test_a_rank_stands_at_the_first_message_that_has_not_ended(plan, tmp_path):
    messages = [[a for a in plan.actions(p) if a.kind.is_message] for p in range(plan.num_positions)]
    ended = [len(own) // 2 for own in messages]
    dumps, errors = read_dumps([written(tmp_path, dumps_of(plan, ended))])
    found = explain(dumps, errors, plan=plan)
    assert [place.texts for place in found.places] == [(str(own[n]),) for own, n in zip(messages, ended, strict=True)]
    assert "rank 0 (position 0) stands at " in str(found)


def test_a_rank_that_launched_no_more_should_come_to_the_next_message(tmp_path):
    plan = lower(one_f_one_b(2, 4))
    dumps, errors = read_dumps([written(tmp_path, dumps_of(plan, [3, 3], launched=0))])
    assert str(explain(dumps, errors, plan=plan).places[0]) == "rank 0 (position 0) should come to 0RECV_B1<1"


@pytest.mark.parametrize("lost", [None, 2], ids=["all dumps", "without the dump of the root"])
def test_the_message_that_should_have_come_first_is_of_the_root(lost, tmp_path):
    plan = lower(one_f_one_b(4, 8))
    messages = [[a for a in plan.actions(p) if a.kind.is_message] for p in range(4)]
    came = next(n for n, a in enumerate(messages[2]) if str(a) == "2SEND_F1>3")  # rank 2 never comes to it
    dumps = dumps_of(plan, [len(one) for one in messages])
    for rank, waits in enumerate(["0RECV_B0<1", "1RECV_B0<2", None, "3RECV_F1<2"]):
        number = came if waits is None else [str(a) for a in messages[rank]].index(waits)
        dumps[rank]["entries"] = dumps[rank]["entries"][: number + (waits is not None)]
        if waits is not None:
            dumps[rank]["entries"][-1]["state"] = "started"
    dumps.pop(lost, None)
    dumps, errors = read_dumps([written(tmp_path, dumps)])
    found = explain(dumps, errors, plan=plan)
    assert named(found) == {2}
    assert str(found).splitlines()[-1] == "first to come: rank 2 (position 2) should come to 2SEND_F1>3"
    assert found.as_json()["first"]["texts"] == ("2SEND_F1>3",)


def test_a_rank_of_another_pipeline_with_an_empty_dump_has_its_place_there(tmp_path):
    plan = lower(one_f_one_b(2, 4))
    rows = [[("send 0->1", 1)], [("recv 1<-0", 1)], [("send 0->1", 1)], []]
    rows[2] = [(*one, "5") for one in rows[2]]
    groups = {"0": [0, 1], "5": [2, 3]}
    dumps, errors = read_dumps([written(tmp_path, job(rows, groups))])
    found = explain(dumps, errors, plan=plan)
    assert [(place.rank, place.position) for place in found.places] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert str(found.first) == "rank 3 (position 1) should come to 1RECV_F0<0"


def test_a_dump_that_begins_later_may_fit_several_actions(tmp_path):
    plan = lower(one_f_one_b(2, 8))
    dumps, errors = read_dumps([written(tmp_path, dumps_of(plan, [9, 9], steps=2, first=8))])
    place = explain(dumps, errors, plan=plan).places[0]
    actions = [str(action) for action in plan.actions(0) if action.kind.is_message]
    assert set(place.texts) < set(actions)
    assert actions[9] in place.texts
    assert str(place).endswith(" or ...")


def test_messages_that_the_plan_has_not_are_an_error(tmp_path):
    dumps, errors = read_dumps([written(tmp_path, job([[("recv 0<-1", 1)], [("send 1->0", 1)]]))])
    with pytest.raises(PlanError, match=r"position 0 has no messages in this order: recv 1 from rank 1"):
        explain(dumps, errors, plan=lower(one_f_one_b(2, 4)))
    with pytest.raises(PlanError, match="a plan of computes has no messages"):
        explain(dumps, errors, plan=one_f_one_b(2, 4))


# ---- Files that are no dump


class Runs:
    def __reduce__(self):
        return (os.system, ("touch owned",))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "byte 0: it is empty"),
        (pickle.dumps(Runs()), "byte 29: it is no pickle of plain data; any other could run code"),
        (pickle.dumps([1, 2]), "it is no dump of a flight recorder"),
        (pickle.dumps({"version": "1.4", "entries": []}), "its version is '1.4'; versions 2.x are read"),
        (
            pickle.dumps({"version": "2.4", "entries": [{"record_id": 1}]}),
            r"entries\[0\] is not as torch writes it \(KeyError",
        ),
        (
            pickle.dumps({"version": "2.4", "pg_config": {"0": {"ranks": "[-1]"}}}),
            "pg_config is not as torch writes it",
        ),
        (pickle.dumps(case("lock_gil_1st")[0][0])[:100], "byte 100: it is cut"),
        (b'{"version": "2.4", "entries": [1, ', "byte 34: Expecting value"),
        (b'{"version": "\xff"}', "byte 13: it is not UTF-8"),
        (b"\x80\x05hello", "byte "),
        (b"\x80\x04\x95" + b"\xff" * 8, "byte "),
    ],
)
def test_what_is_no_dump_is_an_error_with_the_file_and_the_byte(data, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "dump_0"
    file.write_bytes(data)
    with pytest.raises(DumpError, match=text) as caught:
        read_dump(file, 0)
    assert caught.value.file == file
    assert str(file) in str(caught.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02\x8b\xff\xff\xff\x7f\x01",  # an integer of 2 GB
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",  # bytes, of 2**63
        b"\x80\x05\x96" + b"\xff" * 4 + b"\x0f\0\0\0.",  # a bytearray of 64 GB
        b"\x80\x02]r\xff\xff\xff\x7f.",  # the memo's place 2**31
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x02K\x01Q.",  # an object outside
        b"(ios\nsystem\n.",
        b"cos\nsystem\n(S'ls'\ntR.",
        b"I" + b"9" * 10000 + b"\n.",
        b"\x80\x09.",
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"0" * 10,
        b"\x1f\x8b\x08\x00",
        json.dumps({"version": "2.4", "entries": []}).encode("utf-16"),
    ],
    ids=range(15),
)
def test_a_pickle_of_anything_else_is_an_error_and_takes_no_memory(data, tmp_path):
    (tmp_path / "dump_0").write_bytes(data)
    with pytest.raises(DumpError, match="dump_0"):
        read_dump(tmp_path / "dump_0", 0)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("record_id", value) for value in (float("inf"), float("nan"), -1, 1.5, True, "1", None, 2**63)),
        *(("collective_seq_id", value) for value in (None, -3, [])),
        *(("time_created_ns", value) for value in (1e300, "now", -5)),
        *(("process_group", value) for value in ([], {"a": 1}, 3, [3, ""], ["\ud800", ""], ["x" * 2000, ""])),
        *(("state", value) for value in ([1], None, "\x1b[2J")),
        *(("profiling_name", value) for value in ("send 0->7", f"send 0->{'9' * 500}", "send 1->0", None)),
        *(("input_sizes", value) for value in ([[[1]]], [["1"]], "ab", [[1] * 1000], [[]] * 20_000)),
        ("input_dtypes", [["Float"]]),
        *(
            ("ranks", value)
            for value in ("[" * 9000, "__import__('os')", "[1, 2]", "[0, 0]", "{}", "[0.5]", None, [-1, 0])
        ),
        ("ranks", f"[0, {'9' * 400}]"),
    ],
)
def test_an_entry_that_torch_does_not_write_is_an_error_that_names_it(part, value, tmp_path):
    dump = job([[("all_reduce", 1)], []])[0]
    if part == "ranks":
        dump["pg_config"]["0"]["ranks"] = value
    else:
        dump["entries"][0][part] = value
    for form in (pickle.dumps, lambda dump: json.dumps(dump).encode()):
        (tmp_path / "dump_0").write_bytes(form(dump))
        with pytest.raises(DumpError, match=r"dump_0: (entries\[0\]|pg_config) is not as torch writes it"):
            read_dump(tmp_path / "dump_0", 0)


def test_parts_that_a_pickle_shares_are_not_written_out_beyond_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("pipegrid.timeline.dumps.read.LARGEST", 10_000)
    ranks = list(range(100))
    shared = {"version": "2.4", "pg_config": {str(number): {"ranks": ranks} for number in range(101)}, "entries": []}
    data = pickle.dumps(shared)
    assert len(data) < 10_000
    (tmp_path / "dump_0").write_bytes(data)
    with pytest.raises(DumpError, match="more than 10000 ranks of groups"):
        read_dump(tmp_path / "dump_0", 0)


def test_a_dump_under_the_name_of_another_rank_is_an_error(tmp_path):
    dumps = job([[("send 0->1", 1)], [("recv 1<-0", 1)]])
    written(tmp_path, {0: dumps[1], 1: dumps[0]})
    _, errors = read_dumps([tmp_path])
    assert ["a message of rank 1; the file is that of rank 0" in str(errors[0]), len(errors)] == [True, 2]


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("pipegrid.timeline.dumps.read.LARGEST", 10)
    (tmp_path / "dump_0").write_bytes(bytes(11))
    with pytest.raises(DumpError, match="it has 11 bytes; a dump has at most 10"):
        read_dump(tmp_path / "dump_0", 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_file_with_changed_bytes_is_read_or_an_error_of_its_kind(seed, tmp_path):
    chosen = random.Random(seed)
    form = (pickle.dumps, lambda dump: json.dumps(dump).encode())[seed % 2]
    whole = form(case("gpu_error_1st")[0][4])
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(chosen.choice((1, 3, 20))):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        (tmp_path / "dump_4").write_bytes(data)
        try:
            str(explain([read_dump(tmp_path / "dump_4", 4)]))
        except DumpError as error:
            assert str(error).startswith(str(tmp_path / "dump_4"))


def test_names_without_a_rank_twice_a_rank_and_empty_folders_are_errors(tmp_path):
    written(tmp_path, job([[], []]))
    (tmp_path / "notes.txt").write_text("")
    assert len(read_dumps([tmp_path])[0]) == 2
    with pytest.raises(DumpError, match="the name of a dump ends with its rank"):
        read_dumps([tmp_path / "notes.txt"])
    (tmp_path / "dump_1.json").write_text("{}")
    with pytest.raises(DumpError, match="is a dump of rank 1 as well"):
        read_dumps([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="no file in it has a name that ends with a rank"):
        read_dumps([tmp_path / "empty"])


# ---- The command


def test_the_command_prints_the_roots(tmp_path, capsys):
    written(tmp_path, case("lock_gil_2nd")[0])
    (tmp_path / "rank10.json").write_text('{"first_failure": "rank 10: it has gone", "place": "step 3, action 4"}')
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        "root: rank 10 (likely): it has launched nothing that has not ended; 7 ranks wait for it",
        "root: rank 15 (likely): it has launched nothing that has not ended; 7 ranks wait for it",
    ]
    assert "recorded by rank 10: rank 10: it has gone, at step 3, action 4" in printed
    assert main(["explain", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [root["rank"] for root in found["roots"]] == [10, 15]
    assert {wait["for"] for wait in found["waits"] if wait["rank"] == 12} == {15}


def test_the_command_draws_the_plan_with_the_places_of_the_ranks(tmp_path, capsys):
    plan = lower(one_f_one_b(2, 4))
    (tmp_path / "plan.txt").write_text(to_text(plan))
    (tmp_path / "dumps").mkdir()
    written(tmp_path / "dumps", dumps_of(plan, [3, 3]))
    given = [
        "explain",
        str(tmp_path / "dumps"),
        "--plan",
        str(tmp_path / "plan.txt"),
        "--svg",
        str(tmp_path / "out.svg"),
    ]
    assert main(given) == 0
    assert "rank 0 (position 0) stands at 0RECV_B1<1" in capsys.readouterr().out
    drawn = (tmp_path / "out.svg").read_text()
    assert "never ends" in drawn
    assert "never starts, behind that" in drawn
    assert "where the ranks stand" in drawn


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["explain", "dumps/nowhere_0"], "No such file"),
        (["explain", "dumps", "--svg", "out.svg"], "--svg draws the plan"),
        (["explain", "cut_0"], "byte 0: it is empty"),
    ],
)
def test_bad_input_ends_the_command_with_2(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "cut_0").write_bytes(b"")
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_the_last_attempt_of_a_job_is_read(tmp_path):
    dumps = job([[("send 0->1", 1)], [("recv 1<-0", 1)]])
    for attempt in ("", "-1", "-2", "-10"):
        for rank in (0, 1):
            dumps[rank]["entries"][0]["p2p_seq_id"] = 1 + len(attempt)
            (tmp_path / f"nccl_trace_rank_{rank}{attempt}").write_text(json.dumps(dumps[rank]))
            (tmp_path / f"rank{rank}{attempt}.json").write_text(json.dumps({"first_failure": f"attempt {attempt}"}))
    found, errors = read_dumps([tmp_path])
    assert [dump.file.name for dump in found] == ["nccl_trace_rank_0-10", "nccl_trace_rank_1-10"]
    assert errors == []
    assert read_records([tmp_path]) == {0: "attempt -10", 1: "attempt -10"}


def test_records_alone_are_told(tmp_path, capsys):
    (tmp_path / "rank1.json").write_text('{"first_failure": "rank 1: it has gone \\ud800", "place": "step 3"}')
    assert main(["explain", str(tmp_path)]) == 0
    assert "recorded by rank 1: rank 1: it has gone \\ud800, at step 3" in capsys.readouterr().out


def test_a_record_that_is_none_is_an_error(tmp_path):
    (tmp_path / "rank3.json").write_text('{"first": 1}')
    with pytest.raises(DumpError, match="no record of a failed step"):
        read_records([tmp_path])
