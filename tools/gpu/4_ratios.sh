#!/usr/bin/env bash
# Ratios only: ranks that share a GPU are time-sliced.
. "$(dirname "$0")/common.sh"
small=()
quick=()
[ -z "$DRY_RUN" ] || small=(--runs 1 --pairs 31 --sizes 4096) quick=(--quick)
run 240 "$PYTHON" tools/bench/p2p.py --backend "$BENCH_BACKEND" "${small[@]}"
run 350 "$PYTHON" tools/bench/runtime.py --backend "$BENCH_BACKEND" "${quick[@]}" \
    --only overhead real stepping reduction modules --schedules 1f1b zero_bubble_v
finish
