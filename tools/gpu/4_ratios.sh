#!/usr/bin/env bash
# Ratios only: ranks that share a GPU are time-sliced.
. "$(dirname "$0")/common.sh"
small=()
[ -z "$DRY_RUN" ] || small=(--runs 1 --pairs 31 --sizes 4096)
run 300 "$PYTHON" tools/bench/p2p.py --backend "$BENCH_BACKEND" "${small[@]}"
finish
