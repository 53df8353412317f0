#!/usr/bin/env bash
# The lanes: the tests that need a GPU; close() right after a send of 256 MB, release(), a killed peer.
. "$(dirname "$0")/common.sh"
select=()
[ -z "$DRY_RUN" ] || select=(--collect-only -q)
run 540 "$PYTHON" -m pytest "${pytest[@]}" packages/transport/tests/test_transport_gpu.py \
    packages/transport/tests/test_transport_device_groups.py -k "gpu or (nccl and not fake)" "${select[@]}"
finish
