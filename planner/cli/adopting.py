"""The work of ``pipeplan adopt``: from its options to a plan file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.models import (
    LoadedProblem,
    ProblemRequest,
    given_rules,
    job_of,
    loaded_problem,
)
from planner.cli.output import print_json, say, show_plan
from planner.cli.plan import keep_inputs, print_run_command
from planner.errors import PipeplanError, shorten
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.interop.adopt.adopt import Adopted
    from planner.interop.adopt.layout import RuntimeLayout
    from planner.interop.adopt.orders import Schedule
    from planner.plan.problem import Problem


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
        megatron_args: a file of Megatron-LM's arguments; or
        torchtitan: a file of torchtitan's configuration, instead of all of these but devices.
    """

    problem: ProblemRequest
    layout: str | None
    stages: Path | None
    pipeline_size: int | None
    schedule: str | None
    schedule_csv: Path | None
    replicas: int | None
    devices: str | None
    recompute: bool
    runtime: str | None
    megatron_args: Path | None = None
    torchtitan: Path | None = None

    @property
    def inputs(self) -> list[Path]:
        """The files that the plan is made from."""
        files = (self.stages, self.schedule_csv, self.megatron_args, self.torchtitan)
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
    found, loaded, layout = _adopted(request)
    too_large = _checked(found, allow_overflow=allow_overflow)
    if too_large:
        found.plan.save(output)
    else:
        save_valid(found.plan, output)
    if as_json:
        notes = _layout_notes(found, layout)
        print_json(_data(found, output, too_large) | ({"notes": notes} if notes else {}))
    else:
        _show(found, request, output, [*too_large, *_layout_notes(found, layout)])
        if not too_large:
            print_run_command(found.plan, output, loaded.text_problem)
    if loaded.compared is not None:
        say(loaded.compared, err=True)


def _adopted(request: AdoptRequest) -> tuple[Adopted, LoadedProblem, RuntimeLayout | None]:
    """Assemble the plan; what is quick to read is read before the model is traced."""
    names = None if request.devices is None else request.devices.split(",")
    names = names and [name.strip() for name in names if name.strip()]
    layout = _given_layout(request, names)
    if layout is None:
        found, loaded = _adopted_parts(request, names)
    else:
        fields = layout.job_fields(job_of(request.problem.job, request.problem.settings))
        loaded = loaded_problem(replace(request.problem, fields=fields, source=layout.source))
        problem = _run_by(loaded.problem, request, blocks_messages=layout.blocks_messages)
        found = layout.adopted(problem, names)
    return found, loaded, layout


def _adopted_parts(request: AdoptRequest, names: list[str] | None) -> tuple[Adopted, LoadedProblem]:
    """Assemble the plan of stages and a schedule that were given by themselves."""
    from planner.interop.adopt.adopt import adopted
    from planner.interop.adopt.division import divide

    stages, schedule = _given_stages(request), _given_schedule(request)
    loaded = loaded_problem(request.problem)
    problem = _run_by(loaded.problem, request)
    found = adopted(
        problem,
        divide(problem.graph, stages, request.source),
        schedule=schedule,
        pipeline_size=request.pipeline_size,
        replicas=1 if request.replicas is None else request.replicas,
        devices=names,
        recompute_blocks=None if request.recompute else 0,
    )
    return found, loaded


def _run_by(problem: Problem, request: AdoptRequest, *, blocks_messages: bool = False) -> Problem:
    """Return the problem under the rules of ``--runtime``, if that was given."""
    blocks = blocks_messages and request.runtime == "megatron"
    rules = given_rules("megatron-blocking" if blocks else request.runtime)
    return problem if rules is None else replace(problem, runtime=rules)


def _given_layout(request: AdoptRequest, names: list[str] | None) -> RuntimeLayout | None:
    """Return the layout of another runtime; None if the options give the stages.

    Raises:
        PipeplanError: if they give both, or plans cannot express the layout.
    """
    from planner.cluster.cluster import Cluster
    from planner.interop.adopt.megatron import read_megatron_arguments
    from planner.interop.adopt.torchtitan import read_torchtitan_config

    files = {"--megatron-args": request.megatron_args, "--torchtitan": request.torchtitan}
    given = [option for option, path in files.items() if path is not None]
    if not given:
        return None
    beside = {
        "--megatron-layout": request.layout,
        "--stages": request.stages,
        "--pipeline-size": request.pipeline_size,
        "--schedule": request.schedule,
        "--schedule-csv": request.schedule_csv,
        "--recompute": request.recompute or None,
        "--tensor-parallel": request.problem.tensor_parallel,
        "--sequence-parallel": request.problem.sequence_parallel or None,
        "--expert-parallel": request.problem.expert_parallel or None,
    }
    more = [*given[1:], *(name for name, value in beside.items() if value is not None)]
    if more:
        raise PipeplanError(
            f"{', '.join(more)}: {given[0]} says this already; leave out one of the two"
        )
    read = read_megatron_arguments if request.megatron_args else read_torchtitan_config
    path = request.megatron_args or request.torchtitan
    assert path is not None
    count = len(Cluster.load(request.problem.cluster).devices if names is None else names)
    return read(path).on(count, request.replicas)


def _given_stages(request: AdoptRequest) -> str | list[list[str]]:
    from planner.interop.importing.megatron_layout import parse_layout
    from planner.records.document import read_json

    if request.layout is None and request.stages is None:
        raise PipeplanError(
            "stages are missing; give --megatron-layout LAYOUT, --stages FILE, --megatron-args "
            "FILE or --torchtitan FILE"
        )
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

    problems = list(form_problems(found.plan.on_groups, found.plan.parsed_orders()))
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


def _layout_notes(found: Adopted, layout: RuntimeLayout | None) -> list[str]:
    """Return what a layout set in the job, and what it does that is predicted otherwise."""
    if layout is None:
        return []
    job = found.plan.job
    names = ["samples_per_microbatch", "microbatches", "tensor_parallel", "sequence_parallel"]
    names += [name for name in ("shard_optimizer", "recompute_attention") if getattr(job, name)]
    names += ["expert_parallel"] if job.expert_parallel else []
    fields = ", ".join(f"{name} = {json.dumps(getattr(job, name))}" for name in names)
    return [f"{layout.source} sets {fields} in the job", *layout.notes]


def _show(found: Adopted, request: AdoptRequest, output: Path, notes: list[str]) -> None:
    show_plan(found.plan)
    plan = found.plan
    is_layout = request.megatron_args is not None or request.torchtitan is not None
    unused = len(plan.cluster.device_names) - plan.world_size
    if unused:
        say(f"note: {plural(unused, 'device')} of the cluster are unused")
    for line in (*notes, *_megatron_notes(found, request)):
        say(f"note: {line}")
    say(
        f"iteration time {format_seconds(plan.predicted.iteration_time_s)} with {found.schedule}; "
        f"no lower bound, since nothing was searched"
    )
    say(f"wrote {output}")
    say(f"explain it with: pipeplan explain {output}")
    of_job = "" if not is_layout else ", with these figures in the job file"
    say(f"search for a better plan{of_job} with: {_search_command(found, request, output)}")


def _megatron_notes(found: Adopted, request: AdoptRequest) -> list[str]:
    """Return a note if Megatron-LM would reject the number of microbatches."""
    size, share = len(set(found.pipelines[0])), found.plan.microbatches // len(found.pipelines)
    is_megatron = request.layout is not None or request.megatron_args is not None
    if not is_megatron or found.schedule != "interleaved-1f1b" or share % size == 0:
        return []
    return [
        f"Megatron-LM needs a multiple of its {size} pipeline ranks for interleaving, but each "
        f"pipeline has {plural(share, 'microbatch', 'es')}"
    ]


def _search_command(found: Adopted, request: AdoptRequest, output: Path) -> str:
    """Return the command that searches for a better plan, starting from this one."""
    import shlex

    more = ["--warm-start", str(output), "-o", "better.json"]
    more += [] if request.runtime is None else ["--runtime", request.runtime]
    job = found.plan.job
    problem = replace(
        request.problem,
        tensor_parallel=str(job.tensor_parallel) if job.tensor_parallel != 1 else None,
        sequence_parallel=job.sequence_parallel,
        shard_optimizer=job.shards_state,
        expert_parallel=job.expert_parallel,
    )
    return shlex.join(["pipeplan", "plan", *problem.words, *more])
