"""``pipeplan adopt``: the command, and the way from its options to a plan file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.models import LoadedProblem, ProblemRequest, given_rules, loaded_problem
from planner.cli.options import (
    ClusterOption,
    CostsOption,
    JobOption,
    JsonOption,
    ModelArgument,
    PlanOutputOption,
    RunByOption,
    SetOption,
)
from planner.cli.output import print_json, say, show_plan, user_errors
from planner.cli.plan import keep_inputs, print_run_command
from planner.errors import PipeplanError, shorten
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.interop.adopt.adopt import Adopted
    from planner.interop.adopt.orders import Schedule


@dataclass(frozen=True)
class AdoptRequest:
    """The options of ``pipeplan adopt``; None where an option was not given.

    Attributes:
        problem: what to plan for.
        layout: of Megatron-LM; or
        stages: a file of names.
        pipeline_size: ranks of a pipeline.
        schedule: a name; or
        schedule_csv: a file.
        replicas: equal pipelines.
        devices: names, divided by commas.
        recompute: whether blocks run again.
        runtime: name or file of what runs it.
    """

    problem: ProblemRequest
    layout: str | None
    stages: Path | None
    pipeline_size: int | None
    schedule: str | None
    schedule_csv: Path | None
    replicas: int
    devices: str | None
    recompute: bool
    runtime: str | None

    @property
    def inputs(self) -> list[Path]:
        """The files that the plan is made from."""
        files = (self.stages, self.schedule_csv)
        return [*self.problem.inputs, *(path for path in files if path)]

    @property
    def source(self) -> str:
        """The option or file that gives the stages, for messages."""
        return "--megatron-layout" if self.layout is not None else str(self.stages)


def adopt_plan(request: AdoptRequest, output: Path, *, allow_overflow: bool, as_json: bool) -> None:
    """Put a plan together, check it, write it and show it.

    Args:
        request: what it is made of.
        output: plan file.
        allow_overflow: write it even if it does not fit into memory.
        as_json: print JSON.

    Raises:
        PipeplanError: naming what is wrong; nothing is written then.
    """
    from planner.records.document import require_file_path
    from planner.verification import save_valid

    require_file_path(output)
    keep_inputs(output, request.inputs)
    found, loaded = _adopted(request)
    too_large = _checked(found, allow_overflow=allow_overflow)
    if too_large:
        found.plan.save(output)
    else:
        save_valid(found.plan, output)
    if as_json:
        print_json(_data(found, output, too_large))
    else:
        _show(found, request, output, too_large)
        if not too_large:
            print_run_command(found.plan, output, loaded.text_problem)


def _adopted(request: AdoptRequest) -> tuple[Adopted, LoadedProblem]:
    """Assemble the plan; what is quick to read is read before the model is traced."""
    from planner.interop.adopt.adopt import adopted
    from planner.interop.adopt.division import divide

    stages, schedule = _given_stages(request), _given_schedule(request)
    rules = given_rules(request.runtime)
    loaded = loaded_problem(request.problem)
    problem = loaded.problem if rules is None else replace(loaded.problem, runtime=rules)
    names = None if request.devices is None else request.devices.split(",")
    found = adopted(
        problem,
        divide(problem.graph, stages, request.source),
        schedule=schedule,
        pipeline_size=request.pipeline_size,
        replicas=request.replicas,
        devices=names and [name.strip() for name in names if name.strip()],
        recompute=request.recompute,
    )
    return found, loaded


def _given_stages(request: AdoptRequest) -> str | list[list[str]]:
    from planner.interop.importing.megatron_layout import parse_layout
    from planner.records.document import read_json

    if request.layout is None and request.stages is None:
        raise PipeplanError("stages are missing; give --megatron-layout LAYOUT or --stages FILE")
    if request.layout is not None and request.stages is not None:
        raise PipeplanError("--megatron-layout cannot be combined with --stages; give one")
    if request.layout is not None:
        parse_layout(request.layout, request.source)
        return request.layout
    return _name_lists(read_json(str(request.stages)), request.source)


def _name_lists(data: Any, source: str) -> list[list[str]]:
    example = 'a list of lists of names, such as [["wte", "h.0"], ["h.1", "ln_f", "lm_head"]]'
    if not isinstance(data, list) or not data:
        raise PipeplanError(f"{source}: {shorten(data)}: expected {example}")
    problems = [
        f"{source}[{i}]: {shorten(row)}: expected a list of names; the file is {example}"
        for i, row in enumerate(data)
        if not isinstance(row, list) or not all(isinstance(name, str) for name in row)
    ]
    if problems:
        raise PipeplanError(problems)
    return data


def _given_schedule(request: AdoptRequest) -> Schedule:
    from planner.interop.adopt.orders import require_schedule
    from planner.interop.importing.schedule_csv import read_schedule_csv

    if request.schedule is not None and request.schedule_csv is not None:
        raise PipeplanError("--schedule cannot be combined with --schedule-csv; give one")
    if request.schedule_csv is not None:
        return read_schedule_csv(request.schedule_csv)
    require_schedule(request.schedule)
    return request.schedule


def _checked(found: Adopted, *, allow_overflow: bool) -> list[str]:
    """Return the memory problems of a plan if they are allowed.

    Raises:
        PipeplanError: if the plan does not hold for another reason, or it is not allowed.
    """
    from planner.interop.adopt.adopt import overflow_problems
    from planner.verification.form import form_problems

    problems = list(form_problems(found.plan, found.plan.parsed_orders()))
    too_large = overflow_problems(found)
    if problems or (too_large and not allow_overflow):
        raise PipeplanError([*problems, *too_large])
    return too_large


def _data(found: Adopted, output: Path, too_large: list[str]) -> dict[str, Any]:
    """Return the JSON output."""
    return {
        "plan": str(output),
        "schedule": found.schedule,
        "stages": [list(stage.layers) for stage in found.plan.stages],
        "pipelines": [list(dict.fromkeys(devices)) for devices in found.pipelines],
        **found.plan.predicted.model_dump(mode="json"),
        "overflow": too_large,
    }


def _show(found: Adopted, request: AdoptRequest, output: Path, too_large: list[str]) -> None:
    show_plan(found.plan)
    plan = found.plan
    unused = len(plan.cluster.device_names) - len(plan.ranks)
    if unused:
        say(f"note: {plural(unused, 'device')} of the cluster are unused")
    for line in (*too_large, *_megatron_notes(found, request)):
        say(f"note: {line}")
    say(
        f"iteration time {format_seconds(plan.predicted.iteration_time_s)} with {found.schedule}; "
        f"no lower bound, since nothing was searched"
    )
    say(f"wrote {output}")
    say(f"explain it with: pipeplan explain {output}")
    say(f"search for a better plan with: {_search_command(request, output)}")


def _megatron_notes(found: Adopted, request: AdoptRequest) -> list[str]:
    """Return a note if Megatron-LM would reject the number of microbatches."""
    size, share = len(set(found.pipelines[0])), found.plan.microbatches // len(found.pipelines)
    if request.layout is None or found.schedule != "interleaved-1f1b" or share % size == 0:
        return []
    return [
        f"Megatron-LM needs a multiple of its {size} pipeline ranks for interleaving, but each "
        f"pipeline has {plural(share, 'microbatch', 'es')}"
    ]


def _search_command(request: AdoptRequest, output: Path) -> str:
    """Return the command that searches for a better plan, starting from this one."""
    import shlex

    more = ["--warm-start", str(output), "-o", "better.json"]
    more += [] if request.runtime is None else ["--runtime", request.runtime]
    return shlex.join(["pipeplan", "plan", *request.problem.words, *more])


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
    int,
    typer.Option(
        "--replicas",
        metavar="R",
        help="number of data-parallel pipelines; each runs its part of the microbatches",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAME,…",
        help="devices in rank order, the replicas of rank 0 first (default: the cluster's order)",
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option("--recompute", help="full activation checkpointing: recompute every block"),
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
    megatron_layout: LayoutOption = None,
    stages: StagesOption = None,
    pipeline_size: SizeOption = None,
    schedule: ScheduleOption = None,
    schedule_csv: TableOption = None,
    replicas: ReplicasOption = 1,
    devices: DevicesOption = None,
    recompute: RecomputeOption = False,
    allow_overflow: OverflowOption = False,
    runtime: RunByOption = None,
    output: PlanOutputOption = Path("plan.json"),
    as_json: JsonOption = False,
) -> None:
    """Make a plan from a partition and schedule that you already run, without a search."""
    request = AdoptRequest(
        problem=ProblemRequest(model, cluster, job, tuple(set_ or ()), tuple(costs or ())),
        layout=megatron_layout,
        stages=stages,
        pipeline_size=pipeline_size,
        schedule=schedule,
        schedule_csv=schedule_csv,
        replicas=replicas,
        devices=devices,
        recompute=recompute,
        runtime=runtime,
    )
    with user_errors(as_json):
        adopt_plan(request, output, allow_overflow=allow_overflow, as_json=as_json)
