#!/bin/sh
# Run by `make demo`: plan GPT-2 for an irregular cluster, then plan and train it on this machine.
set -eu
mkdir -p demo

bold=''
plain=''
if [ -t 1 ]; then
    bold=$(printf '\033[1m')
    plain=$(printf '\033[0m')
fi

say() { printf '\n%s\n' "$bold$1$plain"; }

say "1. Plan GPT-2 (124M parameters) for up to nine GPUs of three types (examples/clusters/irregular.toml)"
pipeplan plan models.gpt:gpt2_small --cluster examples/clusters/irregular.toml \
    --job examples/jobs/gpt2.toml --time-limit 20 -o demo/irregular.json
pipeplan verify demo/irregular.json
pipeplan plot demo/irregular.json -o demo/irregular.png
pipeplan simulate demo/irregular.json --trace demo/irregular.trace.json >/dev/null

say "2. Plan the same model for four processes on this machine (examples/clusters/this_machine.toml)"
pipeplan plan models.gpt:gpt2_small --cluster examples/clusters/this_machine.toml \
    --job examples/jobs/demo.toml --time-limit 10 -o demo/local.json
pipeplan plot demo/local.json -o demo/local.png

say "3. Train with this plan, on the text of Python's standard library"
OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m executor demo/local.json --steps 12

say "Files in demo/"
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
echo "    (learning-rate schedule, clipping, and 1.5 GB checkpoints in demo/checkpoints; --resume continues)"
