#!/usr/bin/env bash
# The lanes: the tests that need a GPU, and all others that run on any backend.
. "$(dirname "$0")/common.sh"
select=()
[ -z "$DRY_RUN" ] || select=(--collect-only -q)
run 540 "$PYTHON" -m pytest "${plugin[@]}" -m "not nightly" packages/transport/tests/test_transport_gpu.py "${select[@]}"
finish
