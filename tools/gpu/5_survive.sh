#!/usr/bin/env bash
# A rank killed in the middle of a step: the others go on over NCCL, with the weights of the undisturbed run.
. "$(dirname "$0")/common.sh"
backend=cpu:gloo,cuda:nccl
[ -z "$DRY_RUN" ] || backend=gloo
run 300 "$PYTHON" tools/bench/deaths.py --backend "$backend" --rounds 1
finish
