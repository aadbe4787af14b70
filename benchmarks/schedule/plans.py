"""Whole plans of traced models on the sample clusters: how far from their bounds are they?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.harness import Claim, Result, Row, counted, tell
from planner import Cluster, Job, Problem, solve, trace
from planner.verification.proof import prove

GAPS = {
    "single_node": 2.0,
    "irregular": 7.0,
    "two_nodes": 2.0,
    "dapple_testbed": 12.0,
    "eight_nodes": 5.0,
}
"""Clusters, with the bars for gaps on them in percent."""
MODELS: dict[str, dict[str, Any]] = {
    "models.gpt:gpt2_small": {"samples": 4, "length": 1024},
    "models.gpt:gpt2_xl": {"samples": 4, "length": 1024},
    "models.llama:llama2_7b": {"samples": 1, "length": 2048},
    "models.vgg:vgg19": {"samples": 16},
    "models.resnet:resnet50": {"samples": 16},
    "models.unet:unet": {"samples": 4},
}
"""Samples of a microbatch and tokens of a sequence."""
SHORT_MODELS, SHORT_CLUSTERS = ("models.resnet:resnet50",), ("single_node", "irregular")
MOST_ON_FEW = 16
"""Devices up to which 32 microbatches keep a pipeline busy; beyond it 256 are planned."""
SEVERAL: dict[str, list[tuple[dict[str, Any], float]]] = {
    "models.gpt:gpt2_xl": [
        ({"max_stages_per_device": count, "backward": backward, "replication": False}, bar)
        for count in (2, 4)
        for backward, bar in (("whole", 12.0), ("split", 5.0))
    ],
    "models.gpt:gpt2_small": [({"max_stages_per_device": 2}, 15.0)],
}
"""Spaces with several stages a device, by model, with the bars for their gaps in percent."""
CHECK_BAR_S = 5.0


def joint(options: argparse.Namespace) -> Result:
    """Whole plans: traced models on the sample clusters."""
    rows = []
    for model in SHORT_MODELS if options.short else MODELS:
        job = _job_of(model)
        graph = trace(model, job)
        for name in SHORT_CLUSTERS if options.short else GAPS:
            cluster = _cluster(name)
            many = {"microbatches": 256} if len(cluster.devices) > MOST_ON_FEW else {}
            problem = Problem(graph, cluster, job.model_copy(update=many))
            rows.append(_row(model, name, problem, GAPS[name], options.time_limit))
    return Result(rows, list(_claims("whole plans of traced models", rows)))


def several(options: argparse.Namespace) -> Result:
    """Whole plans with several stages a device."""
    rows = []
    for model, spaces in SEVERAL.items():
        job = _job_of(model)
        graph = trace(model, job)
        for changes, bar in spaces[:1] if options.short else spaces:
            for name in SHORT_CLUSTERS[:1] if options.short else list(GAPS)[:3]:
                problem = Problem(graph, _cluster(name), job.model_copy(update=changes))
                title = ", ".join([model, *(f"{key} {value}" for key, value in changes.items())])
                rows.append(_row(title, name, problem, bar, options.time_limit))
    return Result(rows, list(_claims("whole plans with several stages a device", rows)))


def _claims(text: str, rows: list[Row]) -> Iterator[Claim]:
    yield counted(f"{text}: gap within the bar", (row["gap %"] <= row["bar %"] for row in rows))
    yield counted(f"{text}: the certificate proves the bound", (row["proved"] for row in rows))
    slowest_s = max(row["check s"] for row in rows)
    yield Claim(f"{text}: slowest check", slowest_s, at_most=CHECK_BAR_S, unit="s")


def _row(model: str, cluster: str, problem: Problem, bar: float, limit_s: float) -> Row:
    begin_s = time.perf_counter()
    plan = solve(problem, time_limit_s=limit_s).plan
    seconds, begin_s = time.perf_counter() - begin_s, time.process_time()
    proved = not prove(plan).problems
    found = plan.predicted
    row = {
        "model": model.rpartition(":")[2],
        "cluster": cluster,
        "devices": len(problem.cluster.devices),
        "replicas of stages": "-".join(str(len(stage.devices)) for stage in plan.stages),
        "iteration, ms": 1e3 * found.iteration_time_s,
        "bound, ms": 1e3 * found.lower_bound_s,
        "gap %": 100 * (found.iteration_time_s / found.lower_bound_s - 1),
        "bar %": bar,
        "s": seconds,
        "proved": proved,
        "check s": time.process_time() - begin_s,
    }
    tell(str(row))
    return row


def _job_of(model: str) -> Job:
    """Return a job of 32 microbatches; language models are in half precision."""
    sizes = MODELS[model]
    length = sizes.get("length")
    return Job(
        microbatches=32,
        samples_per_microbatch=sizes["samples"],
        precision="float16" if length else "float32",
        model_arguments={"sequence_length": length} if length else {},
    )


def _cluster(name: str) -> Cluster:
    """Return a sample, or eight machines like those of ``two_nodes``."""
    if name != "eight_nodes":
        return Cluster.load(SAMPLE_CLUSTERS / f"{name}.toml")
    nodes = [f"n{number}" for number in range(8)]
    node = {"devices": 8, "type": "A100-80GB", "link": "NVLink3"}
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": name,
            "switches": ["network"],
            "nodes": [{"name": name, **node} for name in nodes],
            "links": [{"between": [name, "network"], "preset": "InfiniBand-HDR"} for name in nodes],
        }
    )
