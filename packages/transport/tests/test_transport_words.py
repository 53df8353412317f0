"""Words of any length and any alphabet: labels of lanes, and why a lane has ended, as the other side hears it."""

import pytest
import torch

from pipegrid.transport import LaneSpec, LaneSpecError, P2PConfig, P2PMismatchError, open_lanes

DEADLINE = 20.0


def config(**settings):
    return P2PConfig(**{"deadline": DEADLINE, "open_deadline": DEADLINE, **settings})


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

    @pytest.mark.parametrize(("label", "size"), [("a" * 4097, 4097), ("é" * 2049, 4098)])
    def test_past_4096_bytes_are_refused_before_anything_is_opened(self, label, size):
        with pytest.raises(LaneSpecError, match=f"has {size} bytes in UTF-8.*give one of at most 4096"):
            LaneSpec(0, 1, label)

    def test_without_bytes_are_refused(self):
        with pytest.raises(LaneSpecError, match="UTF-8 has no bytes for"):
            LaneSpec(0, 1, "half \ud800")
