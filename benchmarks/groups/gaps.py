"""Gaps of plans with groups: how far from the best of one size of groups can they be?"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.groups.cases import BIG, CLUSTERS, MODELS, Graphs, Machines, job_of
from planner import Problem, solve
from planner.records.document import Record

GAP_COLUMNS = ("model", "cluster", "samples", "plan", "s", "bound, s", "gap", "bar", "s of a core")
MANY_NODES = Machines("128 nodes: 1,024 A100-80GB", (BIG,) * 128)
CASES = (
    ("llama2_7b", "one node", 64, 0.01),
    ("llama2_13b", "irregular", 64, 0.06),
    ("llama2_70b", "eight nodes", 256, 0.08),
    ("llama2_13b", "three kinds", 64, 0.10),
    ("llama2_70b", "128 nodes", 2048, 0.10),
)
"""Model, the beginning of the cluster's name, samples of an iteration and the bar for the gap."""
GAP_LIMIT_S = 55.0
"""Deterministic seconds of a search: about two minutes of a core."""


class GapRow(Record):
    """A problem and how near its plan is to the bound.

    Attributes:
        model, cluster: of the problem.
        samples: of an iteration, one a microbatch.
        degree: devices of a group in the plan.
        replicas: of each stage, groups counted as one.
        time_s, bound_s: of an iteration.
        bar: for the gap.
        cpu_s: seconds of a core that the search took.
    """

    model: str
    cluster: str
    samples: int
    degree: int
    replicas: tuple[int, ...]
    time_s: float
    bound_s: float
    bar: float
    cpu_s: float

    @property
    def gap(self) -> float:
        """Iteration time / bound - 1."""
        return self.time_s / self.bound_s - 1

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        replicas = sorted(set(self.replicas))
        data = "-".join(str(count) for count in dict.fromkeys((replicas[0], replicas[-1])))
        return [
            *(self.model, self.cluster, str(self.samples)),
            f"{self.degree} x {len(self.replicas)} x {data}",
            *(f"{self.time_s:.3f}", f"{self.bound_s:.3f}", f"{self.gap:.2%}", f"{self.bar:.0%}"),
            f"{self.cpu_s:.0f}",
        ]


def gap_rows(graphs: Graphs, kept: Path | None, *, plans: bool) -> list[GapRow]:
    """Return a row a case, those that an earlier run kept and others as they are planned.

    Args:
        graphs: of the models.
        kept: folder of rows; None: nothing is kept.
        plans: whether cases that are not kept are planned, or left out with all that follow.
    """
    path = kept and kept / "gaps.jsonl"
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    known = {(row.model, row.cluster): row for row in map(GapRow.model_validate_json, lines)}
    rows = []
    for model, begins, samples, bar in CASES:
        machines = next(c for c in (*CLUSTERS, MANY_NODES) if c.name.startswith(begins))
        row = known.get((model, machines.name))
        if row is None and not plans:
            break
        if row is None:
            row = _planned(graphs, model, machines, samples, bar)
            if path is not None:
                with path.open("a") as file:
                    print(row.model_dump_json(), file=file)
            print(*row.cells, sep="  ", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _planned(graphs: Graphs, model: str, machines: Machines, samples: int, bar: float) -> GapRow:
    graph = graphs.of(next(row for row in MODELS if row.name == model), 1)
    problem = Problem(graph, machines.cluster, job_of(1, samples))
    begin = time.process_time()
    found = solve(problem, time_limit_s=GAP_LIMIT_S, deterministic=True)
    return GapRow(
        model=model,
        cluster=machines.name,
        samples=samples,
        degree=max(found.plan.degrees),
        replicas=tuple(len(stage.devices) for stage in found.plan.stages),
        time_s=found.iteration_time_s,
        bound_s=found.lower_bound_s,
        bar=bar,
        cpu_s=time.process_time() - begin,
    )
