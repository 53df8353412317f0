"""The example of the README, in processes that can import nothing else of pipegrid."""

import pytest

pytestmark = pytest.mark.thorough


def test_both_ranks_that_send_first_pass_over_gloo_and_hang_over_the_fake(readme_example):
    for line in (  # two processes write to one pipe: lines may join
        "gloo, rank 0: received [1.0, 1.0, 1.0, 1.0]",
        "gloo, rank 1: received [0.0, 0.0, 0.0, 0.0]",
        "fake_nccl, rank 0: DistBackendError",
        "fake_nccl, rank 1: DistBackendError",
    ):
        assert line in readme_example
