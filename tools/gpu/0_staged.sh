#!/usr/bin/env bash
# The packages composed, over gloo through pinned memory: on any GPU, whatever its NCCL and however few GPUs there are.
. "$(dirname "$0")/common.sh"
tests 560 staged integration_tests/test_pipeline_steps.py -k "two_real_ranks${DRY_RUN:+ and 2-2}"
finish
