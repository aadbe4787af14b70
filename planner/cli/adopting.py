"""The work of ``pipeplan adopt``: from what the command line tells to a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.models import Asked, Told, told_problem
from planner.cli.output import print_json, show_plan
from planner.cli.plan_output import tell_command
from planner.cli.planning import keep_inputs
from planner.errors import PipeplanError, shorten
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.adopting.adopt import Adopted
    from planner.adopting.orders import Schedule


@dataclass(frozen=True)
class AdoptRequest:
    """What a plan is to be made of; None where an option was not given.

    Attributes:
        asked: the problem.
        layout: of Megatron-LM; or
        stages: a file of names.
        pipeline_size: ranks of a pipeline.
        schedule: a name; or
        schedule_csv: a file.
        replicas: equal pipelines.
        devices: names, divided by commas.
        recompute: whether blocks run again.
    """

    asked: Asked
    layout: str | None
    stages: Path | None
    pipeline_size: int | None
    schedule: str | None
    schedule_csv: Path | None
    replicas: int
    devices: str | None
    recompute: bool

    @property
    def inputs(self) -> list[Path]:
        """Files that the plan is made from."""
        told = (self.stages, self.schedule_csv)
        return [*self.asked.inputs, *(path for path in told if path)]

    @property
    def source(self) -> str:
        """Where the stages stand, for messages."""
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
    from planner.artifacts.document import require_file_path, write_atomically

    require_file_path(output)
    keep_inputs(output, request.inputs)
    found, told = _adopted(request)
    too_large = _checked(found, allow_overflow=allow_overflow)
    write_atomically(output, found.plan.model_dump_json(indent=1) + "\n")
    if as_json:
        print_json(_data(found, output, too_large))
    else:
        _show(found, request, output, too_large)
        if not too_large:
            tell_command(found.plan, output, told.text_problem)


def _adopted(request: AdoptRequest) -> tuple[Adopted, Told]:
    """What is quick to read is read before the model is traced."""
    from planner.adopting.adopt import adopted
    from planner.adopting.division import divide

    stages, schedule = _told_stages(request), _told_schedule(request)
    told = told_problem(request.asked)
    problem = told.problem
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
    return found, told


def _told_stages(request: AdoptRequest) -> str | list[list[str]]:
    from planner.artifacts.document import read_json
    from planner.importing.megatron_layout import parse_layout

    if request.layout is None and request.stages is None:
        raise PipeplanError(
            "stages: nothing says which layers are in which; give --megatron-layout LAYOUT or "
            "--stages FILE"
        )
    if request.layout is not None and request.stages is not None:
        raise PipeplanError(
            "stages: --megatron-layout and --stages both say which layers are in which; give one"
        )
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


def _told_schedule(request: AdoptRequest) -> Schedule:
    from planner.adopting.orders import require_schedule
    from planner.importing.schedule_csv import read_schedule_csv

    if request.schedule is not None and request.schedule_csv is not None:
        raise PipeplanError("schedule: --schedule and --schedule-csv exclude each other; give one")
    if request.schedule_csv is not None:
        return read_schedule_csv(request.schedule_csv)
    require_schedule(request.schedule)
    return request.schedule


def _checked(found: Adopted, *, allow_overflow: bool) -> list[str]:
    """What does not fit into memory, if that is allowed.

    Raises:
        PipeplanError: if the plan does not hold for another reason, or it is not allowed.
    """
    from planner.adopting.overflow import overflow_problems
    from planner.plan_form import form_problems

    problems = list(form_problems(found.plan, found.plan.parsed_orders()))
    too_large = overflow_problems(found)
    if problems or (too_large and not allow_overflow):
        raise PipeplanError([*problems, *too_large])
    return too_large


def _data(found: Adopted, output: Path, too_large: list[str]) -> dict[str, Any]:
    """For programs."""
    return {
        "plan": str(output),
        "schedule": found.schedule,
        "stages": [list(stage.layers) for stage in found.plan.stages],
        "pipelines": [list(dict.fromkeys(lane)) for lane in found.lanes],
        **found.plan.predicted.model_dump(mode="json"),
        "overflow": too_large,
    }


def _show(found: Adopted, request: AdoptRequest, output: Path, too_large: list[str]) -> None:
    show_plan(found.plan)
    plan = found.plan
    unused = len(plan.cluster.device_names) - len(plan.ranks)
    if unused:
        typer.echo(f"note: {plural(unused, 'device')} of the cluster hold no stage")
    for line in (*too_large, *_megatron_notes(found, request)):
        typer.echo(f"note: {line}")
    typer.echo(
        f"{format_seconds(plan.predicted.iteration_time_s)} an iteration with {found.schedule}; no "
        "bound: nothing was searched"
    )
    typer.echo(f"wrote {output}")
    typer.echo(f"why it is not faster: pipeplan explain {output}")
    typer.echo(f"a better one: {_search_command(request, output)}")


def _megatron_notes(found: Adopted, request: AdoptRequest) -> list[str]:
    """Our interleaved 1F1B has rounds of any length, Megatron's has not."""
    size, share = len(set(found.lanes[0])), found.plan.microbatches // len(found.lanes)
    if request.layout is None or found.schedule != "interleaved-1f1b" or share % size == 0:
        return []
    return [
        f"Megatron-LM interleaves only multiples of its {size} pipeline ranks, here are "
        f"{plural(share, 'microbatch', 'es')} for each pipeline"
    ]


def _search_command(request: AdoptRequest, output: Path) -> str:
    """The search that starts from this plan."""
    import shlex

    more = ["--warm-start", str(output), "-o", "better.json"]
    return shlex.join(["pipeplan", "plan", *request.asked.words, *more])
