"""Tracing times, import times and gaps of plans on the sample clusters."""

import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import ROOT

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
    """Return the times of `import planner` in nine fresh processes."""
    return [float(_python(IMPORT)) for _ in range(9)]


def trace_rows(models: Sequence[str] = tuple(MODELS)) -> list[list[object]]:
    """Return a row per model, each traced in its own process."""
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
    """Return a row per sample cluster, with a plan for GPT-2 small."""
    from planner import Cluster, Job, Problem, solve, trace, verify

    examples = ROOT / "examples"
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
