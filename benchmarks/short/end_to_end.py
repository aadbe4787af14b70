"""From a model to a plan in a minute and a half: some models, some clusters, no bars but one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks import end_to_end as full
from benchmarks.claims import Claim, Entry, LeftOut, details, met

MODELS = ("models.gpt:gpt2_small", "models.llama:llama2_7b", "models.resnet:resnet50")
CLUSTERS = ("single_node", "irregular")
OURS = "ourselves"


def entries(time_limit_s: float) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        time_limit_s: of each plan.
    """
    imports = full.import_times_s()
    yield Claim(
        claim="`import planner`, median",
        source=OURS,
        figure=statistics.median(imports),
        unit="s",
        regime=f"{len(imports)} fresh processes",
    )
    yield details("Tracing, one sample a microbatch", full.TRACE_COLUMNS, full.trace_rows(MODELS))
    rows = full.plan_rows(time_limit_s, CLUSTERS)
    kept = sum(row[-1] == full.HOLDS for row in rows)
    claim = "plans that the independent checker finds to hold"
    yield met(claim, OURS, kept, len(rows), regime=f"GPT-2 small, {time_limit_s:g} s a plan")
    yield details(f"GPT-2 small, {time_limit_s:g} s", full.PLAN_COLUMNS, rows)
    left = [name for name in full.CLUSTERS if name not in CLUSTERS]
    yield LeftOut(text=f"{len(full.MODELS) - len(MODELS)} of {len(full.MODELS)} models")
    yield LeftOut(text="the plan for " + ", ".join(left))
