#!/usr/bin/env bash
# Versions, memory of groups, the transports over which two ranks can talk, and one rank at full speed.
# Writes transport.env for the others.
MEASURES_TRANSPORT=1
. "$(dirname "$0")/common.sh"
[ -n "$DRY_RUN" ] || run 20 nvidia-smi
echo "== without the preloaded NCCL"
NCCL_PRELOAD_KEPT=${NCCL_PRELOAD:-}
[ -n "$DRY_RUN" ] || NCCL_PRELOAD='' run 30 "$PYTHON" tools/gpu/facts.py versions
NCCL_PRELOAD=$NCCL_PRELOAD_KEPT
run 30 "$PYTHON" tools/gpu/facts.py versions
rm -f "$KEPT/transport.env"
settings=(
    NCCL_P2P_DISABLE=0
    "NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0"
    "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0"
    "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo"
)
[ -z "$DRY_RUN" ] || settings=("${settings[0]}") # they differ on GPUs only
for setting in "${settings[@]}"; do # 4 times the bound
    # shellcheck disable=SC2086
    run 50 env $setting "$PYTHON" tools/gpu/facts.py exchange --backend "$BENCH_BACKEND" --seconds 40 --works "$OUT/works"
    if [ -f "$OUT/works" ]; then
        rm "$OUT/works"
        echo "$setting works"
        [ -f "$KEPT/transport.env" ] || printf '%s\n' $setting >"$KEPT/transport.env"
    fi
done
use_transport
[ ! -f "$KEPT/transport.env" ] || cp "$KEPT/transport.env" "$OUT/facts_transport.env"
run 100 "$PYTHON" tools/gpu/facts.py memory --backend "$BENCH_BACKEND" --seconds 80
run 200 "$PYTHON" tools/gpu/one_rank.py ${DRY_RUN:+--dry-run}
finish
