"""For DeepSpeed: a PipelineModule with the plan's partition, and a configuration.

Checked against DeepSpeed 0.19.8, ``deepspeed/runtime/pipe``. Its order is its own: 1F1B
(``TrainSchedule``) with one stage a device and as many replicas of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from planner.artifacts.plan import Plan
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.export.cuts import (
    LOSS,
    crossing,
    layers_in_order,
    loss_problems,
    tied_across_stages,
)
from planner.export.deepspeed_entries import entry_notes
from planner.export.deepspeed_module import module_text
from planner.export.exported import Exported
from planner.export.placement import Way, ways_by_place
from planner.export.recomputation import overfull
from planner.export.stage_table import stage_table
from planner.export.their_order import order_notes
from planner.schedule.classics import one_forward_one_backward
from planner.simulator import Timeline, simulate
from planner.units import and_more

TOOL = "DeepSpeed"
DTYPES = {
    "float32": {},
    "float16": {"fp16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # torch's own AdamW: the one that the plan counts, and it needs no compiler.
    "adamw": {"type": "AdamW", "params": {"torch_adam": True}},
    "sgd": {"type": "SGD", "params": {}},
    "sgd_momentum": {"type": "SGD", "params": {"momentum": 0.9}},
}
USE = """\
in your script, with one entry of `layers` for each name of LAYERS in FOLDER/pipeline_module.py:
  folder = "FOLDER"
  sys.path.insert(0, folder)
  from pipeline_module import PlannedPipelineModule
  model = PlannedPipelineModule(layers, loss_fn=loss_fn)
  engine, *_ = deepspeed.initialize(model=model, config=folder + "/ds_config.json")
  engine.train_batch(data_iterator)
start {ranks} processes; rank 0, 1, … must be the devices of "ranks" in FOLDER/stages.json"""


def export(plan: Plan) -> Exported:
    """A plan as ``pipeline_module.py``, ``ds_config.json`` and ``stages.json``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: if DeepSpeed cannot run it: every reason.
    """
    problems = [
        *loss_problems(plan, TOOL),
        *_placement_problems(plan),
        *_cut_problems(plan),
        *_precision_problems(plan),
    ]
    try:
        ways = ways_by_place(plan)
    except PipeplanError as error:
        raise PipeplanError([*error.problems, *problems]) from None
    problems += _share_problems(plan, ways)
    if problems:
        raise PipeplanError(problems)
    timeline = _one_forward_one_backward(plan, ways)
    if full := overfull(timeline):
        raise PipeplanError(
            f"orders: {TOOL} runs 1F1B in place of this plan's order, and with that {row}; plan "
            "with more microbatches in flight to spare: smaller microbatches, or recompute = true"
            for row in full
        )
    layers = [[name for name in held if name != LOSS] for held in layers_in_order(plan)]
    ranks = [device for place in zip(*ways, strict=True) for device in place]
    return Exported(
        files={
            "pipeline_module.py": _module(plan, layers),
            "ds_config.json": json.dumps(_config(plan, len(ways)), indent=1) + "\n",
            "stages.json": stage_table(plan, ranks),
        },
        use=tuple(USE.format(ranks=len(ranks)).splitlines()),
        notes=tuple(_notes(plan, timeline, len(ways))),
    )


def _placement_problems(plan: Plan) -> Iterator[str]:
    held: dict[str, list[int]] = {}
    for stage in plan.stages:
        for device in stage.devices:
            held.setdefault(device, []).append(stage.index)
    several = [(device, stages) for device, stages in held.items() if len(stages) > 1]
    if several:
        device, stages = several[0]
        more = and_more(len(several) - 1, "device")
        yield (
            f"stages[{stages[0]}].devices: {device!r} holds the stages "
            f"{', '.join(map(str, stages))}{more}, but {TOOL} has one stage a rank; plan again "
            "with max_stages_per_device = 1 in the job"
        )


def _cut_problems(plan: Plan) -> Iterator[str]:
    """DeepSpeed hands a layer's output to the next layer, and knows no other way."""
    held = layers_in_order(plan)
    for cut, tensors in enumerate(crossing(plan)):
        last, first = held[cut][-1], held[cut + 1][0]
        for tensor in tensors:
            if tensor.producer != last or tensor.users != (first,):
                yield (
                    f"stages[{cut}].layers: tensor {tensor.name!r} goes from layer "
                    f"{tensor.producer!r} to {', '.join(map(repr, tensor.users[:3]))} across the "
                    f"cut between {last!r} and {first!r}, but a layer of {TOOL} is given only "
                    "what the one before it returns; cut where only neighbours talk"
                )


def _precision_problems(plan: Plan) -> Iterator[str]:
    if plan.job.precision not in DTYPES:
        yield (
            f"job.precision: {plan.job.precision!r}, but {TOOL} trains in {', '.join(DTYPES)}; "
            "plan again with one of these"
        )


def _share_problems(plan: Plan, ways: Sequence[Way]) -> Iterator[str]:
    if plan.microbatches % len(ways):
        yield (
            f"microbatches: {plan.microbatches} among {len(ways)} pipelines, but {TOOL} gives each "
            "as many; plan again with a multiple"
        )


def _one_forward_one_backward(plan: Plan, ways: Sequence[Way]) -> Timeline:
    """The same stages under DeepSpeed's order, microbatches dealt to the pipelines in turn."""
    pipeline = place_plan(plan)
    owner = {
        (stage.index, microbatch): ways[microbatch % len(ways)][stage.index]
        for stage in plan.stages
        for microbatch in range(plan.microbatches)
    }
    return simulate(pipeline, one_forward_one_backward(pipeline, owner))


def _module(plan: Plan, layers: list[list[str]]) -> str:
    recomputed = {name for stage in plan.stages for name in stage.recompute}
    flat = [name for stage in layers for name in stage]
    return module_text(
        model=plan.model.name,
        layers=flat,
        parts=[0, *accumulate(map(len, layers))],
        recompute=[index for index, name in enumerate(flat) if name in recomputed],
    )


def _config(plan: Plan, pipelines: int) -> dict[str, Any]:
    job = plan.job
    optimizer = OPTIMIZERS[job.optimizer]
    config = {
        "train_batch_size": plan.microbatches * job.samples_per_microbatch,
        "train_micro_batch_size_per_gpu": job.samples_per_microbatch,
        "gradient_accumulation_steps": plan.microbatches // pipelines,
        "optimizer": {
            "type": optimizer["type"],
            "params": {"lr": job.learning_rate, **optimizer["params"]},
        },
        **DTYPES[job.precision],
    }
    if any(stage.recompute for stage in plan.stages):
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    return config


def _notes(plan: Plan, timeline: Timeline, pipelines: int) -> Iterator[str]:
    yield from order_notes(TOOL, "1F1B", plan, timeline)
    if any(LOSS in stage.layers for stage in plan.stages):
        yield f"the layer {LOSS!r} is no entry of `layers`: give it as loss_fn"
    for name in tied_across_stages(plan):
        yield f"parameter {name!r} is used by several stages: use TiedLayerSpec for its layers"
    yield from entry_notes(plan)
    if pipelines > 1 and plan.sync.strategy != "all_reduce":
        yield f"sync: {plan.sync.strategy!r} is not carried; {TOOL} averages gradients every step"
