#!/usr/bin/env bash
# Ratios only: ranks that share a GPU are time-sliced.
. "$(dirname "$0")/common.sh"
run 240 "$PYTHON" tools/bench/p2p.py --backend "$BENCH_BACKEND" --runs 1 --seconds 200 ${DRY_RUN:+--quick}
run 350 "$PYTHON" tools/bench/runtime.py --backend "$BENCH_BACKEND" ${DRY_RUN:+--quick} \
    --only overhead real stepping reduction modules --schedules 1f1b zero_bubble_v
finish
