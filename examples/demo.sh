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
pipeplan report demo/irregular.json -o demo/irregular.png
pipeplan simulate demo/irregular.json --trace demo/irregular.trace.json >/dev/null

say "2. Measure this machine for four CPU processes, and the model's layers on it (half a minute each)"
pipeplan detect --ranks 4 --device cpu -o demo/this_machine.toml >demo/detect.log 2>&1 ||
    { cat demo/detect.log; exit 1; }
grep 'ranks compute\|^note: more ranks' demo/detect.log || true
rm -f demo/costs.json
pipeplan profile models.gpt:gpt2_small --job examples/jobs/demo.toml --samples 1 \
    --device cpu --threads 1 -o demo/costs.json

say "3. Plan the same model for these processes"
pipeplan plan models.gpt:gpt2_small --cluster demo/this_machine.toml --costs demo/costs.json \
    --job examples/jobs/demo.toml --time-limit 10 -o demo/local.json
pipeplan report demo/local.json -o demo/local.png

say "4. Train with this plan, on the text of Python's standard library"
ranks=$(python -c 'from planner import Plan; print(len(Plan.load("demo/local.json").ranks))')
if [ "$ranks" = 1 ]; then
    echo "One process is fastest on these cores: together they do hardly more than one."
fi
OMP_NUM_THREADS=1 torchrun --nproc-per-node "$ranks" -m executor demo/local.json --steps 8 \
    --timeline demo/measured.json

say "5. Compare the training step with its prediction"
pipeplan simulate demo/local.json --against demo/measured.json >demo/deviation.txt
sed -n '/^iteration .* measured/,$p' demo/deviation.txt

say "Files in demo/"
echo "  irregular.json            the plan for the irregular cluster: read it, edit it, verify it again"
echo "  irregular.png             its Gantt chart"
echo "  irregular.trace.json      its timeline; open it at https://ui.perfetto.dev"
echo "  this_machine.toml         this machine as a cluster; costs.json: the layers' times on it;"
echo "                            detect.log: how it was measured"
echo "  local.json, local.png     the plan that was just trained"
echo "  measured.json             its measured timeline; deviation.txt: where it differs from the plan"
say "Try next"
echo "  . .venv/bin/activate"
echo "  pipeplan trace models.unet:unet"
echo "  pipeplan plan your.module:factory --cluster your_cluster.toml --job your_job.toml -o plan.json"
echo "  torchrun --nproc-per-node $ranks -m executor demo/local.json --steps 50 --timeline demo/measured.json"
echo "  torchrun --nproc-per-node $ranks -m executor demo/local.json --config examples/train/demo.toml"
echo "    (learning-rate schedule, clipping, and 1.5 GB checkpoints in demo/checkpoints; --resume continues)"
