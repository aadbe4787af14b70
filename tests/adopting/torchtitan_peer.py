"""Stages and orders by torchtitan and torch: JSON of questions in, JSON of answers out."""

import json
import sys
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import pipeline_parallel as titan


def stage(index: int, count: int, rank: int, size: int) -> Any:
    """What a schedule asks of a stage before it runs."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=count,
        group_rank=rank,
        group_size=size,
        group=None,
        is_first=index == 0,
        is_last=index == count - 1,
        submod=None,
        has_backward=True,
    )


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the blocks and the rank of each stage, and the actions of each rank."""
    fields, blocks = question["parallelism"], question["blocks"]
    try:
        parallelism = ParallelismConfig(**fields)
        size = parallelism.pipeline_parallel_degree
        model = SimpleNamespace(layers=[None] * blocks)
        count, *weights = titan._get_pipeline_metadata(SimpleNamespace(pp=size), parallelism, model)
        rows = parallelism.module_fqns_per_model_part
        if rows is None:
            rows = titan._generate_llm_fqn_per_model_part(count, *weights)
        name = parallelism.pipeline_parallel_schedule
        held = [
            titan._get_pp_rank_to_stage_indices_mapping(rank, size, name, len(rows))
            for rank in range(size)
        ]
        orders = []
        for rank, indices in enumerate(held):
            mine = [stage(index, len(rows), rank, size) for index in indices]
            built = titan._build_pipeline_schedule(
                parallelism=parallelism,
                local_batch_size=question["local_batch_size"],
                stages=mine,
                loss_fn=None,
            )
            orders = orders or actions(built)
    except (AssertionError, ValueError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    numbers = [sum(row.startswith("layers.") for row in names) for names in rows]
    return {"stages": numbers, "ranks": held, "orders": orders}


def actions(built: Any) -> list[list[str]]:
    found = getattr(built, "pipeline_order", None) or built._get_pipeline_order()
    return [[str(row) for row in found[rank] if row is not None] for rank in sorted(found)]


if __name__ == "__main__":
    schedules.logger.disabled = titan.logger.disabled = True
    print(json.dumps([answer(question) for question in json.load(sys.stdin)]))
