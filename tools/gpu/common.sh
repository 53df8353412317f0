# Sourced by the scripts beside it: paths, what was carried along, NCCL's settings, and a bound on every command.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DRY_RUN=${DRY_RUN:-}
OUT=${OUT:-runs/gpu}
# What one script leaves for the next: not OUT, which may be an empty folder for each of them.
KEPT=${KEPT:-runs/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" "$KEPT"

for source in packages/*/src; do
    PYTHONPATH="$PWD/$source${PYTHONPATH:+:$PYTHONPATH}"
done
PYTHONPATH="$PWD/docs/examples:$PYTHONPATH"
if [ -n "${CARRIED:-}" ]; then
    site=$(mktemp -d)
    if compgen -G "$CARRIED/*.whl" >/dev/null; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$CARRIED"/*.whl
        PYTHONPATH="$PYTHONPATH:$site"
    fi
    if [ -f "$CARRIED/libnccl.so.2.xz" ]; then
        xz -dkc "$CARRIED/libnccl.so.2.xz" >"$site/libnccl.so.2"
        NCCL_PRELOAD="$site/libnccl.so.2"
    elif [ -f "$CARRIED/libnccl.so.2" ]; then
        NCCL_PRELOAD="$(realpath "$CARRIED/libnccl.so.2")"
    fi
fi
export PYTHONPATH PYTHONUNBUFFERED=1

# The machine's own pytest plugins stay out, and what they or its libraries warn of is no error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
pytest=(-p pipegrid.testing.plugin -W default -m "not nightly")

# Several ranks on one GPU; harmless where each has its own. Few CTAs, so that the ranks' kernels fit beside each other.
export NCCL_MULTI_RANK_GPU_ENABLE=${NCCL_MULTI_RANK_GPU_ENABLE:-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-1}
# The transport setting that 1_facts.sh found to work, such as NCCL_P2P_DISABLE=1.
use_transport() {
    if [ -f "$KEPT/transport.env" ]; then
        set -a
        # shellcheck disable=SC1091
        . "$KEPT/transport.env"
        set +a
    fi
}
[ -n "${MEASURES_TRANSPORT:-}" ] || use_transport

if [ -n "$DRY_RUN" ]; then
    export CUDA_VISIBLE_DEVICES=
    BENCH_BACKEND=gloo
else
    BENCH_BACKEND=nccl
fi

# run SECONDS COMMAND...: bounded, in front of everybody, into a log as well; a failure is reported and does not end the script.
run() {
    local seconds=$1
    shift
    echo "== $*"
    local status=0
    LD_PRELOAD="${NCCL_PRELOAD:-}" timeout "$seconds" "$@" 2>&1 | tee -a "$OUT/$(basename "$0" .sh).log" || status=$?
    [ "$status" = 0 ] || { echo "== ended with status $status"; FAILED=1; }
}
# tests SECONDS BACKEND ARGUMENT...: pytest over a backend; a dry run has the fake NCCL for NCCL.
tests() {
    local backend=$2
    [ -z "$DRY_RUN" ] || [ "$backend" != nccl ] || backend=fake_nccl
    run "$1" "$PYTHON" -m pytest "${pytest[@]}" --backend "$backend" --deadline 300 "${@:3}"
}
FAILED=0
finish() { exit "$FAILED"; }
