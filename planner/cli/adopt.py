"""``pipeplan adopt``: the command and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.adopting import AdoptRequest, adopt_plan
from planner.cli.models import ProblemRequest
from planner.cli.options import (
    ClusterOption,
    CostsOption,
    ExpertParallelOption,
    JobOption,
    JsonOption,
    ModelArgument,
    NoCheckOption,
    PlanOutputOption,
    RunByOption,
    SequenceParallelOption,
    SetOption,
    TensorParallelOption,
)
from planner.cli.output import user_errors

LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--megatron-layout",
        metavar="LAYOUT",
        help="stages in the format of Megatron-LM's --pipeline-model-parallel-layout: "
        "'Et*3|(tt|)*4,L'",
    ),
]
StagesOption = Annotated[
    Path | None,
    typer.Option(
        "--stages",
        metavar="FILE",
        help="JSON file with a list of layer or module names per stage, like torchtitan's "
        "module_fqns_per_model_part",
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--pipeline-size",
        metavar="N",
        help="pipeline ranks; stage i is on rank i % N (default: the number of stages)",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved-1f1b, looped-breadth-first, eager-1f1b, pe, zb-h1, zb-h2, "
        "zb-auto, zb-v or dualpipe-v; zb-v and dualpipe-v need two stages per rank in a V "
        "(default: 1f1b, or interleaved-1f1b with several stages per rank)",
    ),
]
TableOption = Annotated[
    Path | None,
    typer.Option(
        "--schedule-csv",
        metavar="FILE",
        help="CSV schedule of torch.distributed.pipelining, one row per rank; also places the "
        "stages",
    ),
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="number of data-parallel pipelines; each runs its part of the microbatches (default: "
        "1; with --megatron-args as many as the devices suffice for)",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAME,…",
        help="devices in rank order, those of a tensor-parallel group next to each other, the "
        "replicas of pipeline rank 0 first (default: the cluster's order)",
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option("--recompute", help="full activation checkpointing: recompute every block"),
]
MegatronArgsOption = Annotated[
    Path | None,
    typer.Option(
        "--megatron-args",
        metavar="FILE",
        help="Megatron-LM's own arguments, as a launch script has them: stages, tensor-parallel "
        "groups, batch and recomputation",
    ),
]
TorchtitanOption = Annotated[
    Path | None,
    typer.Option(
        "--torchtitan",
        metavar="FILE",
        help="torchtitan's own configuration, TOML or JSON, with its table parallelism",
    ),
]
OverflowOption = Annotated[
    bool,
    typer.Option(
        "--allow-overflow",
        help="write the plan even if it exceeds memory, for `explain` and `simulate`",
    ),
]


def adopt(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    megatron_args: MegatronArgsOption = None,
    torchtitan: TorchtitanOption = None,
    megatron_layout: LayoutOption = None,
    stages: StagesOption = None,
    pipeline_size: SizeOption = None,
    schedule: ScheduleOption = None,
    schedule_csv: TableOption = None,
    replicas: ReplicasOption = None,
    devices: DevicesOption = None,
    recompute: RecomputeOption = False,
    tensor_parallel: TensorParallelOption = None,
    sequence_parallel: SequenceParallelOption = False,
    expert_parallel: ExpertParallelOption = False,
    allow_overflow: OverflowOption = False,
    runtime: RunByOption = None,
    output: PlanOutputOption = Path("plan.json"),
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a plan from a partition and schedule that you already run, without a search."""
    request = AdoptRequest(
        problem=ProblemRequest(
            model,
            cluster,
            job,
            tuple(set_ or ()),
            tuple(costs or ()),
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            expert_parallel=expert_parallel,
            check=not no_check,
        ),
        layout=megatron_layout,
        stages=stages,
        pipeline_size=pipeline_size,
        schedule=schedule,
        schedule_csv=schedule_csv,
        replicas=replicas,
        devices=devices,
        recompute=recompute,
        runtime=runtime,
        megatron_args=megatron_args,
        torchtitan=torchtitan,
    )
    with user_errors(as_json):
        adopt_plan(request, output, allow_overflow=allow_overflow, as_json=as_json)
