"""From a torch model to a plan: tracing times, import times and gaps of the sample clusters.

Usage: python -m benchmarks.end_to_end [--time-limit S] [--output FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import heading, table

MODELS = {
    "models.gpt:gpt2_small": {"sequence_length": 1024},
    "models.gpt:gpt2_xl": {"sequence_length": 1024},
    "models.llama:llama2_7b": {"sequence_length": 4096},
    "models.llama:llama2_70b": {"sequence_length": 4096},
    "models.vgg:vgg16": {},
    "models.resnet:resnet50": {},
    "models.unet:unet": {},
}
CLUSTERS = ("single_node", "irregular", "two_nodes")
TRACE = """
import json, resource, sys, time
from planner import trace
arguments = json.loads(sys.argv[2])
begin = time.perf_counter()
graph = trace(sys.argv[1], **arguments)
seconds = time.perf_counter() - begin
record = graph.record
print(json.dumps({
    "seconds": seconds,
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "layers": len(record.layers),
    "parameters": sum(p.elements for p in record.parameters if p.trainable),
    "tflop": sum(layer.forward_flops for layer in record.layers) / 1e12,
    "coverage": record.flop_coverage,
}))
"""
IMPORT = "import time; b = time.perf_counter(); import planner; print(time.perf_counter() - b)"


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def trace_rows() -> list[list[object]]:
    """Every model traced in a process of its own."""
    rows: list[list[object]] = []
    for model, arguments in MODELS.items():
        found = json.loads(_python(TRACE, model, json.dumps(arguments)))
        rows.append(
            [
                model,
                f"{found['parameters']:,}",
                found["layers"],
                f"{found['tflop']:.3f}",
                f"{found['coverage']:.1%}",
                f"{found['seconds']:.1f}",
                f"{found['peak_gib']:.2f}",
            ]
        )
    return rows


def plan_rows(time_limit_s: float) -> list[list[object]]:
    """GPT-2 small on the sample clusters."""
    from planner import Cluster, Job, Problem, solve, trace, verify

    examples = Path(__file__).parent.parent / "examples"
    job = Job.load(examples / "jobs/gpt2.toml")
    graph = trace("models.gpt:gpt2_small", job)
    rows: list[list[object]] = []
    for name in CLUSTERS:
        cluster = Cluster.load(examples / f"clusters/{name}.toml")
        result = solve(Problem(graph, cluster, job), time_limit_s=time_limit_s)
        rows.append(
            [
                name,
                len(cluster.devices),
                " + ".join(str(len(stage.devices)) for stage in result.plan.stages),
                f"{result.iteration_time_s * 1e3:.2f}",
                f"{result.lower_bound_s * 1e3:.2f}",
                "-" if result.gap is None else f"{result.gap:.2%}",
                result.status,
                f"{result.history[-1].time_s:.1f}",
                "holds" if not verify(result.plan) else "DOES NOT HOLD",
            ]
        )
    return rows


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    imports = [float(_python(IMPORT)) for _ in range(9)]
    parts = [
        heading("From a model to a plan", "python -m benchmarks.end_to_end"),
        f"`import planner`: median {statistics.median(imports):.3f} s, worst {max(imports):.3f} s "
        "of 9 fresh processes.\n",
        "## Tracing, one sample a microbatch\n",
        table(
            ["model", "parameters", "layers", "forward TFLOP", "coverage", "seconds", "peak GiB"],
            trace_rows(),
        ),
        f"## GPT-2 small on the sample clusters, {options.time_limit:g} s\n",
        table(
            [
                "cluster",
                "devices",
                "replicas by stage",
                "iteration ms",
                "bound ms",
                "gap",
                "status",
                "last improvement s",
                "verify",
            ],
            plan_rows(options.time_limit),
        ),
    ]
    text = "\n".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
