#!/usr/bin/env bash
# One rank at full speed.
. "$(dirname "$0")/common.sh"
run 400 "$PYTHON" tools/gpu/one_rank.py ${DRY_RUN:+--dry-run}
finish
