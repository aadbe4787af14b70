#!/bin/sh
# What `make demo` runs: plan GPT-2 for an irregular cluster, then plan and train it right here.
set -eu
mkdir -p demo

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }

say "1. Plan GPT-2 (124M parameters) for up to nine GPUs of three kinds (examples/clusters/irregular.toml)"
pipeplan plan models.gpt:gpt2_small --cluster examples/clusters/irregular.toml \
    --job examples/jobs/gpt2.toml --time-limit 20 -o demo/irregular.json
pipeplan verify demo/irregular.json
pipeplan plot demo/irregular.json -o demo/irregular.png
pipeplan simulate demo/irregular.json --trace demo/irregular.trace.json >/dev/null

say "2. Plan the same model for four processes on this machine (examples/clusters/this_machine.toml)"
pipeplan plan models.gpt:gpt2_small --cluster examples/clusters/this_machine.toml \
    --job examples/jobs/demo.toml --time-limit 10 -o demo/local.json
pipeplan plot demo/local.json -o demo/local.png

say "3. Train it by that plan, on the bytes of Python's own standard library"
OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m executor demo/local.json --steps 12

say "Made in demo/"
echo "  irregular.json            the plan for the irregular cluster: read it, edit it, verify it again"
echo "  irregular.png             its Gantt chart"
echo "  irregular.trace.json      its timeline; open it at https://ui.perfetto.dev"
echo "  local.json, local.png     the plan that was just trained"
say "Try next"
echo "  . .venv/bin/activate"
echo "  pipeplan trace models.unet:unet"
echo "  pipeplan plan your.module:factory --cluster your_cluster.toml --job your_job.toml -o plan.json"
echo "  torchrun --nproc-per-node 4 -m executor demo/local.json --steps 50 --timeline demo/measured.json"
echo "  torchrun --nproc-per-node 4 -m executor demo/local.json --config examples/train/demo.toml"
echo "    (with a schedule, clipping, and checkpoints of 1.5 GB in demo/checkpoints; --resume goes on)"
