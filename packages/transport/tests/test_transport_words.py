"""Words of any length and any alphabet: labels of lanes, and why a lane has ended, as the other side hears it."""

import pytest
import torch

from pipegrid.transport import (
    LaneSpec,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PUsageError,
    open_lanes,
)

from .two_ranks import config


class TestLabels:
    # Escaped for JSON, each of the first kind of characters takes six bytes; half of these labels are past 512 bytes.
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("label", ["画像エンコーダから言語モデルへの" * 20, "\x1b[31m" * 100, "a" * 4096, "é" * 40])
    def test_may_be_long_and_of_any_alphabet(self, ranks, label):
        lane = LaneSpec(0, 1, label)
        with open_lanes([lane], config=config()) as lanes:
            for value in (1.0, 2.0):
                if ranks.rank == 0:
                    lanes[lane].isend(torch.full((2,), value)).wait()
                else:
                    handle = lanes[lane].irecv()
                    assert handle.is_completed() in (True, False)  # the lane's thread, too, is named by the label
                    assert handle.result().tolist() == [value, value]

    @pytest.mark.ranks(2)
    def test_of_different_ranks_are_compared_whole(self, ranks):
        # Told apart only by what lies past the first 512 bytes.
        dtype = torch.float32 if ranks.rank == 0 else torch.float64
        with pytest.raises(P2PMismatchError, match="with different settings.*pipeline_dtype"):
            open_lanes([LaneSpec(0, 1, "é" * 2048)], config=config(pipeline_dtype=dtype))

    @pytest.mark.parametrize("label", ["a" * 4097, "é" * 2049])
    def test_past_4096_bytes_are_refused_before_anything_is_opened(self, label):
        with pytest.raises(P2PUsageError, match="it must be a string of at most 4096 bytes in UTF-8"):
            LaneSpec(0, 1, label)

    def test_without_bytes_are_refused(self):
        with pytest.raises(P2PUsageError, match="in UTF-8"):
            LaneSpec(0, 1, "half \ud800")


class TestLastWords:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        "character", ["e", "é", "\x1b", "画", "\ud800"], ids=["ascii", "two", "ansi", "three", "half"]
    )
    def test_of_any_alphabet_arrive_and_the_lane_is_dead_with_them(self, ranks, character):
        lane = LaneSpec(0, 1, "there")
        with open_lanes([lane], config=config()) as lanes:
            if ranks.rank == 0:
                ranks.barrier()
                lanes.abort("the disk is full " + character * 3000)
            else:
                handle = lanes[lane].irecv()
                ranks.barrier()
                with pytest.raises(P2PPeerError, match="the disk is full .*rank 0 ended lane 0>1.there.") as found:
                    handle.wait()
                assert lanes[lane].error is found.value
                if character != "\ud800":
                    told = str(found.value).split("the disk is full ")[1].split(" (rank 0")[0]
                    assert set(told) == {character}
                    assert len(told.encode()) > 1800
                with pytest.raises(P2PPeerError):
                    handle.wait()
                with pytest.raises(P2PLaneDeadError):
                    lanes[lane].irecv()
            ranks.barrier()

    @pytest.mark.ranks(2)
    def test_of_a_disagreement_stay_one_however_long_the_payload_describes_itself(self, ranks):
        lane = LaneSpec(0, 1, "there")
        first = {f"画像エンコーダの隠れ状態{n}" * 4: torch.ones(2) for n in range(20)}
        with open_lanes([lane], config=config()) as lanes:
            if ranks.rank == 0:
                lanes[lane].isend(first).wait()
                with pytest.raises(P2PMismatchError):
                    lanes[lane].isend({**first, "x": torch.ones(1)})
            else:
                assert lanes[lane].irecv(blocking=True).result().keys() == first.keys()
                with pytest.raises(P2PMismatchError, match=r"message 1.*\(rank 0 ended lane 0>1.there.\)"):
                    lanes[lane].irecv().wait()
                assert isinstance(lanes[lane].error, P2PMismatchError)
            ranks.barrier()
