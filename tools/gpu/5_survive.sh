#!/usr/bin/env bash
# A rank killed in the middle of a step: the others go on over NCCL, with the weights of the undisturbed run.
. "$(dirname "$0")/common.sh"
options=(--backend cpu:gloo,cuda:nccl --rounds 1)
[ -z "$DRY_RUN" ] || options=(--backend gloo --quick)
run 300 "$PYTHON" tools/bench/deaths.py "${options[@]}"
finish
