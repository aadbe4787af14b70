#!/usr/bin/env bash
# Fetch what the GPU machine lacks, as wheels: benchmarks/gpu/wheels.sh PYTHON [FOLDER], for example
# benchmarks/gpu/wheels.sh 3.12. Run it where packages can be fetched; FOLDER (default:
# benchmarks/gpu/wheels, which git ignores) travels with the checkout. Versions: constraints.txt.
set -euo pipefail
python=${1:?usage: benchmarks/gpu/wheels.sh PYTHON [FOLDER], such as 3.12}
here=$(cd "$(dirname "$0")" && pwd)
folder=${2:-$here/wheels}
lacking=(ortools absl-py immutabledict protobuf pydantic pydantic-core annotated-types
    typing-inspection typing-extensions typer annotated-doc pandas)

rm -rf "$folder" && mkdir -p "$folder"
platforms=()
for name in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${name}_x86_64"); done
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version "$python" "${platforms[@]}" \
    --platform manylinux2014_x86_64 --dest "$folder" -c "$here/../../constraints.txt" "${lacking[@]}"
# Our own, for its version: the code that runs is the checkout's.
python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" "$here/../.."
echo "wheels for Python $python: $(du -sh "$folder" | cut -f1) in $folder"
