"""The tools that plans can be exported to, and what an exporter returns."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError
from planner.interop.export.cuts import crossing
from planner.model.blocks import block_name
from planner.model.graph_record import Boundary
from planner.model.group_graph import split_of
from planner.plan.plan import Plan, Stage
from planner.plan.unsupported import FEATURES, Feature, require_without
from planner.units import and_more

FOLDER = "FOLDER"
"""Stands in lines of use for the folder that the files are written into."""


@dataclass(frozen=True)
class Exported:
    """A plan as files of another tool.

    Attributes:
        files: contents by name, to be written into one folder.
        use: how to run it there, lines for the user; ``FOLDER`` stands for the files' folder, also
            as the Python literal ``"FOLDER"``.
        notes: what of the plan the target does not carry or does otherwise, one line each, with
            its cost as far as it can be predicted.
    """

    files: Mapping[str, str]
    use: tuple[str, ...]
    notes: tuple[str, ...]

    def use_in(self, folder: Path) -> tuple[str, ...]:
        """Return the lines of use for files in a folder, valid from any working directory.

        Args:
            folder: that holds the files; its absolute path is told.
        """
        path = str(folder.absolute())
        forms = {FOLDER: shlex.quote(path), f'"{FOLDER}"': json.dumps(path, ensure_ascii=False)}
        return tuple(
            re.sub(f'"{FOLDER}"|{FOLDER}', lambda found: forms[found[0]], row) for row in self.use
        )


FORMAT = "pipeplan-stages/1"


def stage_table(plan: Plan, ranks: Sequence[str], **fields: Any) -> str:
    """Return ``stages.json``: each stage's layers, ranks, and tensors received and sent.

    Args:
        plan: any.
        ranks: the device of rank 0, rank 1, ….
        fields: more of the file, under names of their own.
    """
    rank_of = {device: rank for rank, device in enumerate(ranks)}
    groups = {} if plan.degree == 1 else {"tensor_parallel": plan.degree}
    sent = [[_tensor(tensor) for tensor in tensors] for tensors in crossing(plan)]
    data = {
        "format": FORMAT,
        "model": plan.model.name,
        "ranks": list(ranks),
        "microbatches": plan.microbatches,
        "samples_per_microbatch": plan.job.samples_per_microbatch,
        **groups,
        **fields,
        "stages": [
            _row(plan, stage, rank_of) | {"receives": receives, "sends": sends}
            for stage, receives, sends in zip(plan.stages, [[], *sent], [*sent, []], strict=True)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _row(plan: Plan, stage: Stage, rank_of: dict[str, int]) -> dict[str, Any]:
    held = set(stage.layers)
    devices = [device for name in stage.devices for device in plan.members(name)]
    used = [name for row in plan.model.graph.layers if row.name in held for name in row.parameters]
    return {
        "stage": stage.index,
        "ranks": [rank_of[device] for device in devices],
        "devices": devices,
        "layers": list(stage.layers),
        "parameters": list(dict.fromkeys(used)),
        "recompute": list(stage.recompute),
    }


def _tensor(tensor: Boundary) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}


TARGETS = {
    "torch-csv": "planner.interop.export.torch_csv",
    "torchtitan": "planner.interop.export.torchtitan",
    "megatron": "planner.interop.export.megatron",
    "deepspeed": "planner.interop.export.deepspeed",
}
"""Modules with a function ``export(plan) -> Exported``."""
_GROUPS: Feature = "tensor_parallel"
TAKES: Mapping[str, tuple[Feature, ...]] = {
    "torch-csv": (_GROUPS,),
    "torchtitan": (_GROUPS, "shard_optimizer", "shard_parameters"),
    "megatron": (_GROUPS, "shard_optimizer", "recompute_attention"),
    "deepspeed": (_GROUPS, "shard_optimizer"),
}
"""Features of jobs that a target runs."""


def split_problems(plan: Plan, tool: str) -> Iterator[str]:
    """Yield blocks of which a tensor-parallel group holds a part whole, where a tool splits all.

    Args:
        plan: verified.
        tool: as the line names it.
    """
    found = dict(_indivisible(plan, in_blocks=True))
    if found:
        name, reason = next(iter(found.items()))
        yield (
            f"tensor_parallel: every device of a group holds {name!r} whole"
            f"{and_more(len(found) - 1, 'parameter')} ({reason}), but {tool} splits all heads and "
            f"columns of a block; plan with a tensor_parallel that divides them"
        )


def split_notes(plan: Plan, how: str) -> Iterator[str]:
    """Yield a line on what a group holds whole outside the blocks, such as the vocabulary.

    Args:
        plan: verified.
        how: what the tool does with it.
    """
    names = [name for name, _ in _indivisible(plan, in_blocks=False)]
    if names:
        yield (
            f"tensor_parallel: the plan counts {', '.join(map(repr, names))} whole on every device "
            f"of a group, since {plan.degree} does not divide it; {how}"
        )


def _indivisible(plan: Plan, *, in_blocks: bool) -> Iterator[tuple[str, str]]:
    """Yield the parameters that another degree would split, in numbered blocks or outside."""
    parallel = plan.tensor_parallel
    if parallel is None:
        return
    split = split_of(plan.model.graph, plan.degree, sequence=parallel.sequence)
    for layer in split.layers:
        if (block_name(layer.name) is not None) == in_blocks:
            yield from layer.indivisible.items()


def export_plan(plan: Plan, target: str) -> Exported:
    """Return a plan as files of another tool.

    Args:
        plan: verified.
        target: a name of :data:`TARGETS`.

    Raises:
        PipeplanError: if there is no such target, or it cannot express the plan: every reason.
    """
    if target not in TARGETS:
        raise PipeplanError(f"--to {target}: no such target; choose from {', '.join(TARGETS)}")
    features = [feature for feature in FEATURES if feature not in TAKES[target]]
    require_without(plan.job, f"export --to {target}", features, degree=plan.degree)
    exported: Exported = import_module(TARGETS[target]).export(plan)
    return exported
