#!/usr/bin/env bash
# usage: 3_integration.sh [FILE...]: the packages composed; files of integration_tests in the place of the first ones.
# NCCL among ranks that share a GPU takes milliseconds for each hop: deadlines are generous.
. "$(dirname "$0")/common.sh"
BACKEND=${BACKEND:-nccl}
if [ $# = 0 ]; then
    tests 220 "$BACKEND" integration_tests/test_pipeline_steps.py -k "two_real_ranks${DRY_RUN:+ and 2-2}"
    [ -z "$DRY_RUN" ] || finish
    set -- integration_tests/test_pipeline_steps.py integration_tests/test_unequal_lanes.py -k "not two_real_ranks"
fi
tests 320 "$BACKEND" "$@"
finish
