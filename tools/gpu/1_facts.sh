#!/usr/bin/env bash
# Versions, memory of groups, and the transports over which two ranks can talk. Writes transport.env for the others.
. "$(dirname "$0")/common.sh"
[ -n "$DRY_RUN" ] || run 30 nvidia-smi
echo "== without the preloaded NCCL"
NCCL_PRELOAD_KEPT=${NCCL_PRELOAD:-}
[ -n "$DRY_RUN" ] || NCCL_PRELOAD='' run 60 "$PYTHON" tools/gpu/facts.py versions
NCCL_PRELOAD=$NCCL_PRELOAD_KEPT
run 60 "$PYTHON" tools/gpu/facts.py versions
rm -f "$OUT/transport.env"
settings=(NCCL_P2P_DISABLE=0 NCCL_P2P_DISABLE=1 "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1")
[ -z "$DRY_RUN" ] || settings=("${settings[0]}") # they differ on GPUs only
for setting in "${settings[@]}"; do
    # shellcheck disable=SC2086
    run 75 env $setting "$PYTHON" tools/gpu/facts.py exchange --backend "$BENCH_BACKEND" --seconds 60 --works "$OUT/works"
    if [ -f "$OUT/works" ]; then
        rm "$OUT/works"
        echo "$setting works"
        [ -f "$OUT/transport.env" ] || printf '%s\n' $setting >"$OUT/transport.env"
    fi
done
run 120 "$PYTHON" tools/gpu/facts.py memory --backend "$BENCH_BACKEND" --seconds 100
finish
