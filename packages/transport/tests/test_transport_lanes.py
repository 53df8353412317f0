"""Lanes on real ranks: what goes in comes out, in order; handles tell the truth; buffers come back."""

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import (
    Handle,
    LaneSpec,
    LaneSpecError,
    P2PConfig,
    P2PConfigError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPayloadError,
    P2PTimeoutError,
    P2PUsageError,
    ReceiveHandle,
    open_lanes,
    opening,
    remote_lane,
)

THERE, BACK = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
DEADLINE = 20.0


def config(**settings):
    return P2PConfig(**{"deadline": DEADLINE, "open_deadline": DEADLINE, **settings})


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def equal(a, b):
    """Whether two payloads are the same, structure, dtypes and bytes."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype is b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
            )
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a is b


def values(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


PAYLOADS = {
    "none": None,
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "five dimensions": values((2, 1, 3, 1, 2)),
    "list": [values((2,)), values((3,), torch.int64)],
    "tuple with none": (None, values((2, 2), torch.bool), None),
    "dict": {"hidden": values((2, 3), torch.bfloat16), "mask": values((2,), torch.bool), 4: None},
    "nested": [{"a": (values((2,)), [None, torch.zeros(0)])}, []],
    "only empties": [torch.zeros(0), torch.zeros(0, 3, dtype=torch.int8)],
    "nothing at all": {},
    "complex": values((3,), torch.complex64),
    "float8": values((3,)).to(torch.float8_e4m3fn),
    "float8 scalar": torch.tensor(2.0).to(torch.float8_e4m3fn),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
@pytest.mark.parametrize("shapes", ["agreed", "header"])
def test_every_payload_arrives_as_it_was_sent(ranks, shapes, communicators):
    specs = {name: LaneSpec(0, 1, name) for name in PAYLOADS}
    with open_lanes(specs.values(), config=config(shapes=shapes, communicators=communicators)) as lanes:
        for name, payload in PAYLOADS.items():
            for _ in range(3):
                if ranks.rank == 0:
                    lanes[specs[name]].isend(payload).wait()
                else:
                    assert equal(payload, lanes[specs[name]].irecv().result()), name


@pytest.mark.ranks(2)
def test_received_tensors_are_fresh_leaves_and_floats_require_grad(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            for _ in range(2):
                lane.isend([torch.ones(2), torch.ones(2, dtype=torch.int64)]).wait()
        else:
            first, second = (lane.irecv().result() for _ in range(2))
            assert [t.requires_grad for t in first] == [True, False]
            assert first[0].is_leaf
            assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.ranks(2)
def test_gradients_flow_back_only_for_what_the_sender_marked(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            x, mask = torch.ones(2, requires_grad=True), torch.ones(2)
            y = x * 3
            lanes[THERE].isend({"y": y, "mask": mask}).wait()
            grads = lanes[BACK].irecv().result()
            assert grads["mask"] is None
            y.backward(grads["y"])
            assert x.grad.tolist() == [6.0, 6.0]
        else:
            received = lanes[THERE].irecv().result()
            assert received["y"].requires_grad
            assert not received["mask"].requires_grad
            (received["y"] * received["mask"] * 2).sum().backward()
            lanes[BACK].isend({name: tensor.grad for name, tensor in received.items()}).wait()


@pytest.mark.ranks(2)
def test_what_requires_grad_may_not_grow_without_a_renewal(ranks):
    # The receiver was told with the first message, and would send no gradient for what is unfrozen later.
    def payload(*marks):
        return [torch.ones(2, requires_grad=mark) for mark in marks]

    with open_lanes([THERE, BACK], config=config()) as lanes:
        lane, received = lanes[THERE], []
        marks = [(True, False), (False, False), (True, False)]  # training, evaluation, training
        for sent in marks:
            if ranks.rank == 0:
                lane.isend(payload(*sent)).wait()
            else:
                received.append([tensor.requires_grad for tensor in lane.irecv().result()])
        if ranks.rank == 0:
            with pytest.raises(P2PUsageError, match=r"message 3.*tensor 1 requires grad, but rank 1.*call renew\(\)"):
                lane.isend(payload(True, True))
            with pytest.raises(P2PUsageError, match="tensor 1 requires grad"), lanes.batch():
                refused, other = lane.isend(payload(True, True)), lanes[BACK].irecv()
            assert other.sequence == -1
            with pytest.raises(P2PUsageError, match="tensor 1 requires grad"):
                refused.wait()
            lane.isend(payload(False, False)).wait()
        else:
            received.append([tensor.requires_grad for tensor in lane.irecv().result()])
        lane.renew()
        if ranks.rank == 0:
            lane.isend(payload(True, True)).wait()
            assert lanes[BACK].irecv().result().tolist() == [1.0]
        else:
            received.append([tensor.requires_grad for tensor in lane.irecv().result()])
            assert received == [[True, False]] * 4 + [[True, True]]
            lanes[BACK].isend(torch.ones(1)).wait()


@pytest.mark.ranks(2)
def test_messages_keep_their_order_whoever_is_waited_for_first(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane, count = lanes[THERE], 20
        if ranks.rank == 0:
            handles = [lane.isend(torch.full((3,), float(n))) for n in range(count)]
            for handle in reversed(handles):
                handle.wait()
        else:
            handles = [lane.irecv() for _ in range(count)]
            for n in (7, 3, 19, *range(count)):
                assert handles[n].result().tolist() == [n] * 3
            assert [handle.sequence for handle in handles] == list(range(count))


@pytest.mark.ranks(2)
def test_handles_satisfy_the_protocol_and_may_be_waited_for_again(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        handle = lanes[THERE].isend(torch.ones(2)) if ranks.rank == 0 else lanes[THERE].irecv()
        assert isinstance(handle, Handle)
        assert isinstance(handle, ReceiveHandle) == (ranks.rank == 1)
        for _ in range(3):
            handle.wait()
            handle.wait(0.5)
            handle.synchronize()
            assert handle.is_completed()
        assert repr(handle) == f"<{'send' if ranks.rank == 0 else 'receive'} 0 of lane 0>1[there]: done>"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("messages", [1, 3])
def test_is_completed_tells_the_truth_without_a_wait(ranks, messages):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for _ in range(messages):
            if ranks.rank == 0:
                handle = lane.isend(torch.ones(2))
                ranks.barrier()
                assert not handle.is_completed()  # nobody has posted the receive
                ranks.barrier()
            else:
                ranks.barrier()
                time.sleep(0.02)
                ranks.barrier()
                handle = lane.irecv()
            until(handle.is_completed)
            handle.wait()


@pytest.mark.ranks(2)
def test_a_receive_before_its_send_is_not_completed(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            handle = lanes[THERE].irecv()
            assert not handle.is_completed()
            assert not handle.is_completed()
            ranks.barrier()
            until(handle.is_completed)
            assert handle.result().tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_sends_that_nobody_waits_for_are_delivered_and_let_go(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 0:
            tensor = torch.full((5,), 3.0)
            alive = weakref.ref(tensor)
            lanes[THERE].isend(tensor)
            del tensor
            until(lambda: gc.collect() is not None and alive() is None)
        else:
            time.sleep(0.2)
            assert lanes[THERE].irecv().result().tolist() == [3.0] * 5
        ranks.barrier()


@pytest.mark.ranks(2)
def test_many_threads_may_wait_for_one_handle(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            time.sleep(0.1)
            lane.isend(torch.ones(2)).wait()
            lane.isend(torch.zeros(2)).wait()
        else:
            first, second = lane.irecv(), lane.irecv()
            seen = []
            threads = [
                threading.Thread(target=lambda handle=handle: seen.append(handle.result().sum().item()))
                for handle in (second, first, first, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            assert sorted(seen) == [0, 0, 2, 2]


@pytest.mark.ranks(2)
def test_on_done_is_called_once_without_a_wait_and_may_start_the_next_hop(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            for n in range(3):
                lanes[THERE].isend(torch.full((2,), float(n))).wait()
            for n in range(3):
                assert lanes[BACK].irecv().result().tolist() == [n + 1.0] * 2
        else:
            calls = []

            def forward(handle):
                calls.append(handle.sequence)
                lanes[BACK].isend(handle.result().detach() + 1)

            for _ in range(3):
                lanes[THERE].irecv().on_done(forward)
            until(lambda: len(calls) == 3)
            assert calls == [0, 1, 2]
        ranks.barrier()


@pytest.mark.ranks(2)
def test_on_done_of_what_is_done_is_called_at_once(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        handle = lanes[THERE].isend(torch.ones(2)) if ranks.rank == 0 else lanes[THERE].irecv()
        handle.wait()
        calls = []
        handle.on_done(calls.append)
        assert calls == [handle]


@pytest.mark.ranks(2)
def test_a_callback_that_raises_ends_the_lane(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            lane.isend(torch.ones(2)).wait()
        else:
            handle = lane.irecv()
            handle.on_done(lambda _: 1 / 0)
            until(lambda: lane.error is not None)
            with pytest.raises(P2PLaneDeadError, match=r"on_done callback.*raised ZeroDivisionError"):
                lane.irecv()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_released_buffers_are_used_again(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane, in_flight, messages = lanes[THERE], 2, 8
        if ranks.rank == 0:
            for n in range(messages):
                lane.isend(torch.full((4,), float(n))).wait()
            assert lane.stats.messages == lane.stats.transfers == messages
            assert lane.stats.bytes == messages * 16
        else:
            handles = [lane.irecv() for _ in range(in_flight)]
            for n in range(messages):
                handle = handles.pop(0)
                tensor = handle.result()
                assert tensor.tolist() == [n] * 4
                (tensor * 2).sum().backward()
                assert tensor.grad.tolist() == [2.0] * 4
                handle.release()
                handle.release()
                with pytest.raises(P2PUsageError, match="was released"):
                    handle.result()
                if n + in_flight < messages:
                    handles.append(lane.irecv())
                assert lane.stats.live == min(in_flight, messages - n - 1)
            # As many as were ever in use at once.
            assert lane.stats.allocations == in_flight


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
def test_a_reused_buffer_is_a_new_tensor(ranks, size):
    with open_lanes([THERE]) as lanes:
        lane, seen = lanes[THERE], []
        for n in range(4):
            if ranks.rank == 0:
                lane.isend(torch.full((size,), float(n), requires_grad=True)).wait()
                continue
            handle = lane.irecv()
            payload = handle.result()
            assert (payload.requires_grad, payload.is_leaf, payload.grad) == (True, True, None)
            assert (payload[0].item(), payload[-1].item()) == (n, n)
            payload.sum().backward()
            seen.append(payload)
            handle.release()
        if ranks.rank == 1:
            assert lane.stats.allocations == 1
            assert len({id(payload) for payload in seen}) == 4
            assert len({payload.data_ptr() for payload in seen}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{}, {"receives_ahead": 2}], ids=["asked for", "ahead"])
@pytest.mark.parametrize("release", [False, True])
def test_buffers_made_in_inference_mode_serve_training_too(ranks, settings, release):
    with open_lanes([THERE], config=config(**settings)) as lanes:
        for n in range(8):
            with torch.inference_mode(n % 4 in (1, 2)):
                if ranks.rank == 0:
                    lanes[THERE].isend(torch.full((2,), float(n))).wait()
                    continue
                handle = lanes[THERE].irecv()
                received = handle.result()
                assert received.tolist() == [n, n]
                if not torch.is_inference_mode_enabled():
                    (received * 2).sum().backward()
                    assert received.grad.tolist() == [2, 2]
                if release:
                    handle.release()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
def test_payloads_that_are_kept_share_no_memory(ranks, size):
    with open_lanes([THERE]) as lanes:
        lane = lanes[THERE]
        for n in range(4):
            if ranks.rank == 0:
                lane.isend(torch.full((size,), float(n))).wait()
        if ranks.rank == 1:
            kept = [lane.irecv().result() for _ in range(4)]
            assert [payload[-1].item() for payload in kept] == [0, 1, 2, 3]
            assert lane.stats.allocations == lane.stats.live == 4


@pytest.mark.ranks(2)
def test_what_is_under_way_cannot_be_released(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 1:
            handle = lanes[THERE].irecv()
            with pytest.raises(P2PUsageError, match="cannot be released before it is done"):
                handle.release()
        ranks.barrier()
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            handle.wait()


class Counted:
    """A backend, and what was asked of it and of its works: ``(verb, bytes)``, and ``("wait", bytes)``."""

    def __init__(self, backend, seen):
        self.backend, self.seen = backend, seen

    def send(self, tensors, *where):
        return self._started("send", tensors, where)

    def recv(self, tensors, *where):
        return self._started("recv", tensors, where)

    def _started(self, verb, tensors, where):
        size = sum(tensor.nbytes for tensor in tensors)
        self.seen.append((verb, size))
        work = getattr(self.backend, verb)(tensors, *where)

        def wait(timeout):
            self.seen.append((f"wait for {verb}", size))
            return work.wait(timeout)

        return SimpleNamespace(wait=wait, is_completed=work.is_completed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "payload", [torch.ones(3), [torch.ones(3)], torch.ones(3, dtype=torch.complex64)], ids=["plain", "list", "bytes"]
)
def test_a_steady_exchange_is_one_message_each_way_and_no_host_wait(ranks, together, payload):
    size = (payload[0] if isinstance(payload, list) else payload).nbytes
    with open_lanes([THERE, BACK], config=config()) as lanes:
        mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
        seen = []
        for lane in (mine, theirs):
            communicator = lane.wire.communicator
            communicator.backend = Counted(communicator.backend, seen)
            communicator.control = Counted(communicator.control, seen)

        def exchange():
            with lanes.batch() if together else contextlib.nullcontext():
                sent, received = mine.isend(payload), theirs.irecv()
            received.wait()
            sent.wait()

        exchange()
        assert len(seen) > 4  # the headers of the first messages
        seen.clear()
        before = mine.stats, theirs.stats
        for _ in range(10):
            exchange()
        assert sorted(seen) == sorted(
            [("send", size), ("recv", size), ("wait for recv", size), ("wait for send", size)] * 10
        )
        for old, new in zip(before, (mine.stats, theirs.stats), strict=True):
            assert new.messages - old.messages == new.transfers - old.transfers == 10
            assert new.bytes - old.bytes == 10 * size
            assert new.headers == old.headers == 1
            assert new.host_syncs == old.host_syncs


class TestBatch:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("communicators", ["separate", "shared"])
    def test_is_issued_at_its_end_and_nests(self, ranks, communicators):
        with open_lanes([THERE, BACK], config=config(communicators=communicators)) as lanes:
            for n in range(3):
                with lanes.batch():
                    with lanes.batch():
                        sent = (lanes[THERE] if ranks.rank == 0 else lanes[BACK]).isend(torch.full((2,), float(n)))
                    received = (lanes[BACK] if ranks.rank == 0 else lanes[THERE]).irecv()
                    assert sent.sequence == received.sequence == -1
                    assert not sent.is_completed()
                    with pytest.raises(P2PUsageError, match=r"waited for inside the batch\(\)"):
                        received.wait()
                assert sent.sequence == received.sequence == n
                assert received.result().tolist() == [n, n]
                sent.wait()

    @pytest.mark.ranks(2)
    def test_that_raises_issues_nothing(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            if ranks.rank == 0:
                with pytest.raises(ZeroDivisionError), lanes.batch():
                    lane.isend(torch.zeros(2))
                    _ = 1 / 0
                handle = lane.isend(torch.ones(2))
                handle.wait()
                assert handle.sequence == 0
            else:
                assert lane.irecv().result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("steady", [False, True])
    def test_of_a_dead_lane_and_a_sound_one_issues_the_sound_ones_part(self, ranks, steady):
        specs = [LaneSpec(0, 1, "dies"), LaneSpec(0, 1, "lives")]
        with open_lanes(specs, config=config()) as lanes:
            dies, lives = (lanes[spec] for spec in specs)
            for _ in range(2 if steady else 0):
                for lane in (dies, lives):
                    (lane.isend(torch.zeros(2)) if ranks.rank == 0 else lane.irecv()).wait()
            ranks.barrier()
            if ranks.rank == 0:
                with pytest.raises(P2PLaneDeadError), lanes.batch():
                    lost, sent = dies.isend(torch.ones(2)), lives.isend(torch.ones(2))
                    dies.abort("while it is held")
                sent.wait()
                with pytest.raises(P2PLaneDeadError):
                    lost.wait()
            else:
                assert lives.irecv().result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    def test_of_what_was_agreed_before_a_renewal_agrees_anew(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            for n in range(2):
                (lane.isend(torch.full((2,), float(n))) if ranks.rank == 0 else lane.irecv()).wait()
            with lanes.batch():
                handle = lane.isend(torch.full((2,), 2.0)) if ranks.rank == 0 else lane.irecv()
                lane.renew()
            handle.wait()
            assert ranks.rank == 0 or handle.result().tolist() == [2, 2]
            assert lane.stats.headers == 2

    @pytest.mark.ranks(2)
    def test_keeps_the_order_of_a_lane_whatever_form_its_receives_have(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            for n in range(0, 8, 2):
                if ranks.rank == 0:
                    for value in (n, n + 1):
                        lane.isend(torch.full((2,), float(value))).wait()
                    continue
                with lanes.batch():
                    listed, plain = lane.irecv([(2,)]), lane.irecv((2,))
                assert listed.result()[0].tolist() == [n, n]
                assert plain.result().tolist() == [n + 1, n + 1]

    @pytest.mark.ranks(2)
    def test_belongs_to_its_thread(self, ranks):
        with open_lanes([THERE, BACK], config=config()) as lanes:
            mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
            with lanes.batch():
                held = mine.isend(torch.ones(2)) if ranks.rank == 0 else None
                issued = []
                thread = threading.Thread(target=lambda: issued.append(theirs.irecv()))
                thread.start()
                thread.join()
                assert issued[0].sequence == 0
                assert held is None or held.sequence == -1
            if ranks.rank == 1:
                mine.isend(torch.zeros(2)).wait()
            issued[0].wait()


class TestLocalLane:
    HERE = LaneSpec(0, 0, "here")

    @pytest.mark.ranks(1)
    def test_is_a_copy_with_the_same_rules(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            lane = lanes[self.HERE]
            assert lane.group is None
            early = lane.irecv((2,))
            assert not early.is_completed()
            tensor = torch.ones(2)
            lane.isend(tensor).wait()
            tensor.zero_()
            assert early.is_completed()
            assert early.result().tolist() == [1, 1]
            assert early.result().requires_grad
            lane.isend(torch.full((2,), 2.0))
            lane.isend(torch.full((2,), 3.0))
            assert [lane.irecv().result()[0].item() for _ in range(2)] == [2, 3]
            assert lane.stats.messages == 6

    @pytest.mark.ranks(1)
    def test_refuses_another_shape(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            lanes[self.HERE].isend(torch.ones(2))
            with pytest.raises(P2PMismatchError, match=r"message 1 of lane 0>0\[here\] is float32\[3\]"):
                lanes[self.HERE].isend(torch.ones(3))
        with open_lanes([self.HERE], config=config()) as lanes:
            handle = lanes[self.HERE].irecv((3,))
            with pytest.raises(P2PMismatchError, match=r"shape \[3\].*announced float32\[2\]"):
                lanes[self.HERE].isend(torch.ones(2))
            with pytest.raises(P2PMismatchError):
                handle.wait()

    @pytest.mark.ranks(1)
    def test_a_receive_that_nobody_answers_ends_at_the_deadline(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            with pytest.raises(P2PTimeoutError, match=r"rank 0 waited 0\.1 s for receiving message 0"):
                lanes[self.HERE].irecv().wait(0.1)
            with pytest.raises(P2PLaneDeadError, match="dead on rank 0"):
                lanes[self.HERE].isend(torch.ones(1))

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("shapes", ["header", "manifest"])
    def test_shapes_may_vary(self, ranks, shapes):
        with open_lanes([self.HERE], config=config(shapes=shapes)) as lanes:
            lane = lanes[self.HERE]
            payloads = [torch.ones(n) for n in range(3)]
            if shapes == "manifest":
                lane.announce(payloads)
            for payload in payloads:
                lane.isend(payload)
                assert equal(payload, lane.irecv().result())

    @pytest.mark.ranks(1)
    def test_a_message_in_no_manifest_is_refused_and_may_be_announced_then(self, ranks):
        with open_lanes([self.HERE], config=config(shapes="manifest")) as lanes:
            lane = lanes[self.HERE]
            with pytest.raises(P2PUsageError, match="message 0 of lane 0>0.here. is in no manifest"):
                lane.isend(torch.ones(2))
            lane.announce([torch.ones(2)])
            assert lane.isend(torch.ones(2)).sequence == 0
            assert lane.irecv().result().tolist() == [1, 1]
        with pytest.raises(P2PLaneDeadError):
            lane.announce([torch.ones(2)])

    @pytest.mark.ranks(1)
    def test_a_next_hop_starts_when_the_message_comes(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            came = []
            lanes[self.HERE].irecv().on_done(lambda handle: came.append(handle.result().item()))
            assert not came
            lanes[self.HERE].isend(torch.tensor(4.0))
            assert came == [4.0]


class TestUse:
    @pytest.mark.ranks(2)
    def test_each_end_has_its_verb(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            if ranks.rank == 0:
                with pytest.raises(P2PUsageError, match=r"rank 0 cannot receive on lane 0>1.*it is the source"):
                    lanes[THERE].irecv()
            else:
                with pytest.raises(P2PUsageError, match=r"rank 1 cannot send on lane 0>1.*it is the destination"):
                    lanes[THERE].isend(torch.ones(1))
                with pytest.raises(P2PUsageError, match="rank 1 cannot announce"):
                    lanes[THERE].announce([])
            ranks.barrier()

    @pytest.mark.ranks(2)
    def test_what_cannot_be_sent_is_refused_and_the_lane_lives(self, ranks):
        with open_lanes([THERE], config=config(pipeline_dtype=torch.float32)) as lanes:
            lane = lanes[THERE]
            if ranks.rank == 0:
                for _ in range(2):  # before and after the shape stands
                    for wrong in (
                        torch.ones(2, 2).t(),
                        torch.ones(2, dtype=torch.float64),
                        torch.ones(2, device="meta"),
                    ):
                        with pytest.raises(P2PPayloadError):
                            lane.isend(wrong)
                    lane.isend(torch.ones(2)).wait()
            else:
                for _ in range(2):
                    assert lane.irecv((2,)).result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
            (torch.tensor([2.0]), torch.tensor([1 + 2j]).conj().imag),
        ],
        ids=["conjugate", "negative"],
    )
    def test_a_view_that_changes_values_is_refused_and_the_lane_lives(self, ranks, right, wrong):
        with open_lanes([THERE], config=config()) as lanes:
            for _ in range(3):  # before and after the shape stands
                if ranks.rank == 0:
                    with pytest.raises(P2PPayloadError, match="view, whose memory holds something else"):
                        lanes[THERE].isend(wrong)
                    lanes[THERE].isend(right).wait()
                else:
                    assert lanes[THERE].irecv().result().tolist() == right.tolist()

    @pytest.mark.ranks(2)
    def test_a_send_that_torch_cannot_see_as_bytes_costs_no_message(self, ranks, monkeypatch):
        def cannot(tensors, device):
            raise RuntimeError("no view of it")

        with open_lanes([THERE], config=config()) as lanes:
            for value in (1.0, 2.0):
                if ranks.rank == 0:
                    with monkeypatch.context() as patch, pytest.raises(P2PPayloadError, match="bytes: no view of it"):
                        patch.setattr(remote_lane, "carried", cannot)
                        lanes[THERE].isend([torch.zeros(2)])
                    lanes[THERE].isend([torch.full((2,), value)]).wait()
                else:
                    handle = lanes[THERE].irecv()
                    assert handle.result()[0].tolist() == [value, value]
                    assert handle.sequence == value - 1

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("timeout", [0, -1.0, "soon", float("inf"), float("nan"), 1e10, True])
    def test_a_timeout_is_a_time(self, ranks, timeout):
        with open_lanes([THERE], config=config()) as lanes:
            handle = lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()
            ranks.barrier()
            with pytest.raises(P2PUsageError, match="give seconds above 0"):
                handle.wait(timeout)
            handle.wait()


class TestOpening:
    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("communicators", ["separate", "shared"])
    def test_each_lane_has_carried_a_message_the_way_that_payloads_go(self, ranks, monkeypatch, communicators):
        specs = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b"), LaneSpec(1, 2), LaneSpec(2, 0), LaneSpec(1, 1)]
        carried, seen = [], []

        def post(parcels):
            ((wire, _, sending),) = parcels
            wire.communicator.backend = Counted(wire.communicator.backend, seen)
            try:
                outcomes = wire_post(parcels)
            finally:
                wire.communicator.backend = wire.communicator.backend.backend
            carried.append((wire, sending))
            return outcomes

        wire_post = opening.post
        monkeypatch.setattr(opening, "post", post)
        with open_lanes(specs, config=config(communicators=communicators)) as lanes:
            remote = [lane for lane in lanes.values() if not lane.spec.is_local]
            assert carried == [(lane.wire, lane.rank == lane.spec.source) for lane in remote]
            for lane in remote:
                verb = "send" if lane.rank == lane.spec.source else "recv"
                assert seen.pop(0) == (verb, 1)
                assert seen.pop(0) == (f"wait for {verb}", 1)
            assert not seen

    @pytest.mark.ranks(3)
    def test_only_members_get_a_lane(self, ranks):
        specs = [LaneSpec(0, 1), LaneSpec(1, 2), LaneSpec(2, 0), LaneSpec(1, 1)]
        with open_lanes(specs, config=config()) as lanes:
            assert list(lanes) == sorted(spec for spec in specs if ranks.rank in spec.pair)
            groups = {id(lane.group) for lane in lanes.values() if lane.group is not None}
            assert len(groups) == sum(not spec.is_local for spec in lanes)

    @pytest.mark.ranks(3)
    def test_in_one_order_whatever_each_rank_knows_and_says_first(self, ranks):
        everything = [LaneSpec(a, b, label) for a in range(3) for b in range(3) if a != b for label in "xy"]
        mine = [spec for spec in everything if ranks.rank in spec.pair]
        given = mine if ranks.rank == 0 else everything[:: -1 if ranks.rank == 1 else 1]
        with open_lanes(given, config=config()) as lanes:
            assert set(lanes) == set(mine)

    @pytest.mark.ranks(2)
    def test_twice_gives_lanes_of_their_own(self, ranks):
        with open_lanes([THERE], config=config()) as first, open_lanes([THERE], config=config()) as second:
            if ranks.rank == 0:
                sent = [lanes[THERE].isend(torch.tensor(float(n))) for n, lanes in enumerate((first, second))]
                for handle in sent:
                    handle.wait()
            else:
                assert second[THERE].irecv().result().item() == 1
                assert first[THERE].irecv().result().item() == 0

    @pytest.mark.ranks(2)
    def test_on_a_shared_communicator_all_lanes_of_two_ranks_use_one_group(self, ranks):
        specs = [THERE, BACK, LaneSpec(0, 1, "more")]
        with open_lanes(specs, config=config(communicators="shared")) as lanes:
            assert len({id(lane.group) for lane in lanes.values()}) == 1

    @pytest.mark.ranks(2)
    def test_different_settings_are_told_on_both_sides(self, ranks):
        dtype = torch.float32 if ranks.rank == 0 else torch.bfloat16
        with pytest.raises(P2PMismatchError, match=r"lane 0>1\[there\] with different settings.*pipeline_dtype"):
            open_lanes([THERE], config=config(pipeline_dtype=dtype))

    @pytest.mark.ranks(2)
    def test_shapes_that_stand_from_the_start_need_no_header(self, ranks):
        example = {"x": torch.empty(2, 3, device="meta"), "n": torch.empty(4, dtype=torch.int64, device="meta")}
        with open_lanes([THERE], config=config(), standing={THERE: example}) as lanes:
            payload = {"x": values((2, 3)), "n": values((4,), torch.int64)}
            if ranks.rank == 0:
                lanes[THERE].isend(payload).wait()
            else:
                assert equal(payload, lanes[THERE].irecv().result())
            assert lanes[THERE].stats.headers == lanes[THERE].stats.host_syncs == 0

    @pytest.mark.ranks(2)
    def test_shapes_that_stand_are_compared_first(self, ranks):
        example = torch.empty(2 + ranks.rank, 900, device="meta")
        with pytest.raises(P2PMismatchError, match=r"'standing': \('float32\[[23], 900\]', 'float32\[[23], 900\]'\)"):
            open_lanes([THERE], config=config(), standing={THERE: example})

    @pytest.mark.ranks(2)
    def test_what_requires_grad_from_the_start_is_compared_first(self, ranks):
        example = [torch.empty(2, requires_grad=True), torch.empty(2, requires_grad=ranks.rank == 0)]
        with pytest.raises(P2PMismatchError, match="different settings.*'gradients': .*True, False"):
            open_lanes([THERE], config=config(), standing={THERE: example})

    @pytest.mark.ranks(2)
    def test_a_lane_twice_or_past_the_world_is_refused(self, ranks):
        with pytest.raises(LaneSpecError, match="lane 0>1 is given twice"):
            open_lanes([LaneSpec(0, 1), LaneSpec(0, 1)])
        with pytest.raises(LaneSpecError, match="lane 0>2 has rank 2, but the world has 2 ranks"):
            open_lanes([LaneSpec(0, 2)])
        with pytest.raises(LaneSpecError, match="standing gives shapes for"):
            open_lanes([THERE], standing={BACK: torch.ones(1)})

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "meta"), ("mpi", None)])
    def test_backend_and_device_must_go_together(self, ranks, backend, device):
        with pytest.raises(P2PConfigError, match="gloo moves CPU tensors and nccl CUDA tensors"):
            open_lanes([LaneSpec(0, 0)], backend=backend, device=device)

    @pytest.mark.ranks(2)
    def test_closed_lanes_free_their_groups_and_say_so(self, ranks):
        lanes = open_lanes([THERE], config=config())
        group = lanes[THERE].group
        assert dist.get_process_group_ranks(group) == [0, 1]
        assert not lanes.closed
        lanes.close()
        lanes.close()
        assert lanes.closed
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(group)
        with pytest.raises(P2PLaneDeadError, match="was closed on rank"):
            lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("device", ["gpu0", 3.5, "cpu:x"])
    def test_a_device_is_one(self, ranks, device):
        with pytest.raises(P2PConfigError, match=f"the device is {device!r}, which torch does not know"):
            open_lanes([LaneSpec(0, 0)], device=device)

    @pytest.mark.ranks(2)
    def test_lanes_that_nothing_holds_any_more_say_so(self, ranks):
        lane = open_lanes([THERE], config=config())[THERE]
        gc.collect()
        with pytest.raises(P2PLaneDeadError, match=r"nothing held what open_lanes\(\) returned.*keep it as long as"):
            lane.isend(torch.ones(1)) if ranks.rank == 0 else lane.irecv()

    @pytest.mark.ranks(2)
    def test_no_thread_outlives_its_lanes(self, ranks):
        before = set(threading.enumerate())
        with open_lanes([THERE], config=config()) as lanes:
            handle = lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()
            until(handle.is_completed)
            assert any(thread.name.startswith("pipegrid") for thread in threading.enumerate())
        assert set(threading.enumerate()) <= before
