"""Where shapes vary, a message of one tensor comes with its header, in a receive that was posted beside it."""

from __future__ import annotations

import pytest
import torch

from pipegrid.transport import open_lanes
from pipegrid.transport.lane.landing import HEADERS_AHEAD, Landings
from pipegrid.transport.messages.message import Signature, TensorSpec

from .two_ranks import THERE, config, count, equal, values

GROWING = [(number, 3) for number in range(1, 9)]
SHRINKING = GROWING[::-1]
TURNS = [(1000, 8), (2,)] * 4
JUMPS = [(4,), (4,), (4,), (4096,), (4,), (4096,), (0,), (4096,), (), (4096,), (8192,), (1,), (8192,)]


def numbers(size):
    return Signature(0, [TensorSpec("uint8", (size,))])


def test_a_receive_is_as_large_as_what_was_announced_before_it():
    landings, found = Landings(), []
    for size in [16, 8, 20, 20, 20, 2, 0]:
        receive = landings.next_size()
        found.append((receive, landings.announced(numbers(size), receive)))
    assert HEADERS_AHEAD == 2
    assert found == [(0, False), (0, False), (18, False), (18, False), (22, True), (22, True), (22, True)]


def test_a_huge_message_comes_by_itself_and_makes_no_buffer_larger():
    landings, found = Landings(), []
    for size in [8, 2**27, 8, 8]:
        receive = landings.next_size()
        found.append((receive, landings.announced(numbers(size), receive)))
    assert found == [(0, False), (0, False), (9, True), (9, True)]


def test_headers_of_messages_of_several_tensors_bring_none():
    landings = Landings()
    for _ in range(3):
        landings.announced(numbers(64), landings.next_size())
    several = Signature(("list", (0, 1)), [TensorSpec("uint8", (4,))] * 2)
    assert not landings.announced(several, landings.next_size())
    assert landings.announced(numbers(64), landings.next_size())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("shapes", [GROWING, SHRINKING, TURNS, JUMPS], ids=["growing", "shrinking", "turns", "jumps"])
def test_shapes_may_grow_shrink_and_change_by_turns(ranks, shapes, ahead, release):
    dtypes = [torch.float32, torch.float64, torch.int16, torch.bool, torch.complex64]
    messages = [values(shape, dtypes[n % len(dtypes)]) + n for n, shape in enumerate(shapes)]
    with open_lanes([THERE], config=config(variable_seq_lengths=True)) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            for handle in [lane.isend(message) for message in messages]:
                handle.wait()
        else:
            kept = []
            handles = [lane.irecv() for _ in range(ahead)]
            for n, expected in enumerate(messages):
                handle = handles.pop(0)
                kept.append(handle.result())
                assert equal(kept[-1].detach(), expected)
                if n + ahead < len(messages):
                    handles.append(lane.irecv())
                if release:
                    kept.clear()
                    handle.release()
            assert all(equal(one.detach(), expected) for one, expected in zip(kept, messages, strict=False))
        assert lane.stats.headers == lane.stats.messages == len(messages)
        assert lane.stats.bytes == sum(max(one.nbytes, 1) for one in messages)


@pytest.mark.ranks(2, backend="gloo")
def test_what_is_asked_of_gloo(ranks):
    """From the third message on a receive and a send beside those of the header, and none that waits for the header."""
    seen = []
    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        lane = lanes[THERE]
        count(lane, seen)
        for length in (64, 64, 32, 80, 8):
            seen.append(length)
            if ranks.rank == 0:
                lane.isend(torch.zeros(length, dtype=torch.uint8)).wait()
            else:
                lane.irecv(blocking=True).wait()
            ranks.barrier()
        seen = list(seen)  # without the end of the lane
    header = 512
    if ranks.rank == 0:
        sent = [one for one in seen if isinstance(one, int) or one[0] == "send"]
        found = [[size for _, size in part] for part in _parts(sent)]
        assert found == [[header, 64], [header, 64], [header, 32], [header, 1, 80], [header, 8]]
    else:
        found = [" ".join(f"{verb.replace('wait for ', '= ')} {size}" for verb, size in part) for part in _parts(seen)]
        assert found == [
            f"recv {header} = recv {header} recv 64 = recv 64",
            f"recv {header} = recv {header} recv 64 = recv 64",
            f"recv {header} recv 72 = recv {header} = recv 72",
            f"recv {header} recv 72 = recv {header} = recv 72 recv 80 = recv 80",
            f"recv {header} recv 72 = recv {header} = recv 72",
        ]


def _parts(seen):
    """What was noted between two numbers."""
    parts = []
    for one in seen:
        if isinstance(one, int):
            parts.append([])
        else:
            parts[-1].append(one)
    return parts


@pytest.mark.ranks(2)
def test_payloads_of_every_form_by_turns(ranks):
    one = torch.ones(3, 3, requires_grad=True)
    payloads = [one, None, [one, one.detach() * 2], one, {"a": one}, [None], one[:0], (one, None), one, [one], one[0]]
    long = [torch.zeros(1)] * 60  # a header in two parts
    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        lane = lanes[THERE]
        for payload in [*payloads, long, *payloads]:
            if ranks.rank == 0:
                lane.isend(payload)
            else:
                assert equal(lane.irecv().result(), payload)
        ranks.barrier()


@pytest.mark.ranks(2)
def test_a_received_tensor_is_no_view_and_takes_gradients(ranks):
    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        lane = lanes[THERE]
        for turn in range(4):
            if ranks.rank == 0:
                lane.isend([torch.ones(2, requires_grad=True), torch.ones(2)][turn % 2])
                continue
            with torch.inference_mode(turn < 2):
                received = lane.irecv().result()
            assert not received._is_view()
            assert not received.is_inference()
            weight = torch.ones(2, requires_grad=True)
            (received.detach().mul_(weight) if turn % 2 else received * weight).sum().backward()
            assert weight.grad.tolist() == [1.0, 1.0]
        ranks.barrier()
