#!/usr/bin/env bash
# usage: tools/gpu/pack.sh DIR [LIBNCCL]: what a machine without a network lacks, beside torch.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 DIR [LIBNCCL]" >&2; exit 2; }
mkdir -p "$1"
if [ -z "${DRY_RUN:-}" ]; then
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d "$1" \
        attrs cattrs typing_extensions pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers
fi
if [ $# -ge 2 ]; then
    case $2 in
    *.xz) cp "$2" "$1/libnccl.so.2.xz" ;;
    *) cp "$2" "$1/libnccl.so.2" ;;
    esac
fi
du -sh "$1"
