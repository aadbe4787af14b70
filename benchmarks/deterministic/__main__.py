"""Iteration times and bounds of plans in deterministic mode: every sample cluster x 4 models.

``python -m benchmarks.deterministic --output after.json --compare before.json`` solves every
problem that the output lacks and prints a Markdown table; exit status 1 if a plan became slower or
a bound lower than in the file to compare with. The same input gives the same plan on any machine,
so any difference comes from the code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.reporting.report import table
from planner import Cluster, Job, ModelSource, Problem, solve, trace

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2_small": ("models.gpt:gpt2_small", {"sequence_length": 256}),
    "bert_base": ("models.bert:bert_base", {}),
    "resnet50": ("models.resnet:resnet50", {}),
    "vgg16": ("models.vgg:vgg16", {}),
}
FLOAT32_CLUSTERS = ("this_machine", "dapple_testbed")
"""Sample clusters with devices that do not compute in bfloat16."""
TIME_LIMIT_S = 3.0
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Outcome:
    """The result of one problem.

    Attributes:
        iteration_time_s: predicted time of the plan.
        lower_bound_s: proved for every plan of the space.
    """

    iteration_time_s: float
    lower_bound_s: float


def outcome_of(model: str, cluster: str) -> Outcome:
    """Plan a model of :data:`MODELS` for a sample cluster."""
    factory, arguments = MODELS[model]
    job = Job(
        name="deterministic",
        samples_per_microbatch=2,
        microbatches=8,
        precision="float32" if cluster in FLOAT32_CLUSTERS else "bfloat16",
        model_arguments=arguments,
    )
    graph = trace(factory, job)
    problem = Problem(
        graph,
        Cluster.load(SAMPLE_CLUSTERS / f"{cluster}.toml"),
        job,
        ModelSource(factory, arguments),
    )
    result = solve(problem, time_limit_s=TIME_LIMIT_S, deterministic=True)
    return Outcome(result.iteration_time_s, result.lower_bound_s)


def solve_missing(output: Path, models: list[str]) -> dict[str, Outcome]:
    """Solve what the output file lacks; each outcome is written as soon as it is known."""
    found = read(output) if output.exists() else {}
    for model in models:
        for path in sorted(SAMPLE_CLUSTERS.glob("*.toml")):
            name = f"{model}/{path.stem}"
            if name not in found:
                found[name] = outcome_of(model, path.stem)
                rows = {key: asdict(value) for key, value in found.items()}
                output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def read(path: Path) -> dict[str, Outcome]:
    """Read a file of outcomes."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {name: Outcome(**row) for name, row in rows.items()}


def worse(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the problems whose plan is slower, or whose bound is lower, than before."""
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        slower = new.iteration_time_s > old.iteration_time_s * (1 + TOLERANCE)
        if slower or new.lower_bound_s < old.lower_bound_s * (1 - TOLERANCE):
            yield name


def rows_of(
    before: Mapping[str, Outcome], after: Mapping[str, Outcome]
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; times in ms."""
    for name, new in after.items():
        old = before.get(name)
        yield (
            *name.split("/"),
            "-" if old is None else f"{old.iteration_time_s * 1e3:.6g}",
            f"{new.iteration_time_s * 1e3:.6g}",
            "-" if old is None else f"{old.lower_bound_s * 1e3:.6g}",
            f"{new.lower_bound_s * 1e3:.6g}",
        )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deterministic")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the outcomes")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier run")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    before = read(options.compare) if options.compare else {}
    after = solve_missing(options.output, options.models)
    columns = ("model", "cluster", "time before", "time", "bound before", "bound")
    print(table(columns, list(rows_of(before, after))))
    found = sorted(worse(before, after))
    for name in found:
        print(f"worse than before: {name}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
