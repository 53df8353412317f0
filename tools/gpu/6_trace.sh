#!/usr/bin/env bash
# Profiler traces of one 1F1B step on two ranks: which NCCL kernels could run beside compute, by where receives start.
. "$(dirname "$0")/common.sh"
run 300 "$PYTHON" tools/gpu/trace.py --backend "$BENCH_BACKEND" --out "$OUT"
finish
