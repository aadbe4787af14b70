#!/usr/bin/env bash
# 1. Before, where packages can be fetched:   benchmarks/gpu/wheels.sh 3.12
# 2. Take the checkout with benchmarks/gpu/wheels to the machine with the GPU; it needs no network.
# 3. There:   bash benchmarks/gpu/run.sh 5 --output FOLDER     (minutes; it ends by itself)
# 4. FOLDER has GPU.md, to read, and gpu.jsonl, the journal. The same command tries again what
#    failed or was not reached; --only models parity runs the cases with such a word in their name.
# --short rehearses with tiny models, on a CPU too. Status 0: all cases ran and met their bars.
set -euo pipefail
begin=$SECONDS
minutes=${1:-5}
shift || true
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=${WHEELS:-$root/benchmarks/gpu/wheels}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

if compgen -G "$wheels/*.whl" >/dev/null; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --disable-pip-version-check --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH=$root:$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# What was spent so far counts; a minute more, and whatever still runs is killed.
left=$(awk "BEGIN { print $minutes - ($SECONDS - $begin) / 60 }")
limit=$(awk "BEGIN { print int(60 * $minutes + 60) }")
timeout --kill-after=5 "$limit" python3 -m benchmarks.gpu --minutes "$left" "$@"
