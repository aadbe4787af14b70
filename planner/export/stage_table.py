"""The stages of a plan as a small JSON file, for people's own scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from planner.artifacts.graph_record import Boundary
from planner.artifacts.plan import Plan, Stage
from planner.export.cuts import crossing

FORMAT = "pipeplan-stages/1"


def stage_table(plan: Plan, ranks: Sequence[str], **fields: Any) -> str:
    """What each stage holds, where it lies, and what it hands on.

    Args:
        plan: any.
        ranks: the device of rank 0, rank 1, ….
        fields: more of the file, under names of their own.
    """
    rank_of = {device: rank for rank, device in enumerate(ranks)}
    sent = [[_tensor(tensor) for tensor in tensors] for tensors in crossing(plan)]
    data = {
        "format": FORMAT,
        "model": plan.model.name,
        "ranks": list(ranks),
        "microbatches": plan.microbatches,
        "samples_per_microbatch": plan.job.samples_per_microbatch,
        **fields,
        "stages": [
            _row(plan, stage, rank_of) | {"receives": receives, "sends": sends}
            for stage, receives, sends in zip(plan.stages, [[], *sent], [*sent, []], strict=True)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _row(plan: Plan, stage: Stage, rank_of: dict[str, int]) -> dict[str, Any]:
    held = set(stage.layers)
    used = [name for row in plan.model.graph.layers if row.name in held for name in row.parameters]
    return {
        "stage": stage.index,
        "ranks": [rank_of[device] for device in stage.devices],
        "devices": list(stage.devices),
        "layers": list(stage.layers),
        "parameters": list(dict.fromkeys(used)),
        "recompute": list(stage.recompute),
    }


def _tensor(tensor: Boundary) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
