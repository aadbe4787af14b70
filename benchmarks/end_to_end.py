"""From a torch model to a plan: tracing times, import times and gaps of the sample clusters.

Usage:
    python -m benchmarks.end_to_end [--time-limit S] [--output FILE]
    python -m benchmarks.end_to_end --short [--json] [--claims FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims import add_short_options, is_short, tell
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
TRACE_COLUMNS = (
    *("model", "parameters", "layers", "forward TFLOP", "coverage", "seconds", "peak GiB"),
)
PLAN_COLUMNS = (
    *("cluster", "devices", "replicas by stage", "iteration ms", "bound ms", "gap", "status"),
    *("last improvement s", "verify"),
)
HOLDS = "holds"
IMPORT = "import time; b = time.perf_counter(); import planner; print(time.perf_counter() - b)"


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def import_times_s() -> list[float]:
    """Of nine fresh processes."""
    return [float(_python(IMPORT)) for _ in range(9)]


def trace_rows(models: Sequence[str] = tuple(MODELS)) -> list[list[object]]:
    """Every model traced in a process of its own."""
    rows: list[list[object]] = []
    for model in models:
        found = json.loads(_python(TRACE, model, json.dumps(MODELS[model])))
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


def plan_rows(time_limit_s: float, clusters: Sequence[str] = CLUSTERS) -> list[list[object]]:
    """GPT-2 small on the sample clusters."""
    from planner import Cluster, Job, Problem, solve, trace, verify

    examples = Path(__file__).parent.parent / "examples"
    job = Job.load(examples / "jobs/gpt2.toml")
    graph = trace("models.gpt:gpt2_small", job)
    rows: list[list[object]] = []
    for name in clusters:
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
                HOLDS if not verify(result.plan) else "DOES NOT HOLD",
            ]
        )
    return rows


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true", help="with --short: print JSON lines")
    add_short_options(parser)
    options = parser.parse_args()
    if options.json and not options.short:
        parser.error("--json goes with --short")
    if is_short(parser, options):
        from benchmarks.short import end_to_end as short

        tell(short.entries(options.time_limit), options.claims, as_json=options.json)
        return
    imports = import_times_s()
    parts = [
        heading("From a model to a plan", "python -m benchmarks.end_to_end"),
        f"`import planner`: median {statistics.median(imports):.3f} s, worst {max(imports):.3f} s "
        "of 9 fresh processes.\n",
        "## Tracing, one sample a microbatch\n",
        table(TRACE_COLUMNS, trace_rows()),
        f"## GPT-2 small on the sample clusters, {options.time_limit:g} s\n",
        table(PLAN_COLUMNS, plan_rows(options.time_limit)),
    ]
    text = "\n".join(parts)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
