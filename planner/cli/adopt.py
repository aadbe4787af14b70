"""``pipeplan adopt``: a plan from a partition and schedule that somebody already runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from planner.cli.output import print_json, require_outputs, say, show, show_plan, user_errors
from planner.cli.plan import print_run_command
from planner.cli.problems import LoadedProblem, ProblemFiles, given_rules
from planner.errors import PipeplanError, shorten
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.interop.adopted import Adopted, Schedule
    from planner.interop.layout import RuntimeLayout

EXAMPLE = 'a list of lists of names, such as [["wte", "h.0"], ["h.1", "ln_f", "lm_head"]]'
GROUP_FIELDS = ("tensor_parallel", "sequence_parallel", "expert_parallel")
LAYOUT_FIELDS = (
    *("samples_per_microbatch", "microbatches", *GROUP_FIELDS[:2]),
    *("shard_optimizer", "recompute_attention", "expert_parallel"),
)
"""Fields of the job that a layout may set, in the order in which they are printed."""

StagesOption = Annotated[
    str | None,
    typer.Option(
        "--stages",
        metavar="LAYOUT|FILE",
        help="stages in the format of Megatron-LM's --pipeline-model-parallel-layout, such as "
        "'Et*3|(tt|)*4,L', or a JSON file with a list of layer or module names per stage, like "
        "torchtitan's module_fqns_per_model_part",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME|FILE",
        help="gpipe, 1f1b, interleaved-1f1b, looped-breadth-first, eager-1f1b, pe, zb-h1, "
        "zb-h2, zb-auto, zb-v or dualpipe-v (the last two need two stages per rank in a V), or "
        "a CSV schedule of torch.distributed.pipelining, which also places the stages "
        "(default: 1f1b, or interleaved-1f1b with several stages per rank)",
    ),
]
PipelineSizeOption = Annotated[
    int | None,
    typer.Option(
        "--pipeline-size",
        metavar="N",
        help="pipeline ranks; stage i is on rank i % N (default: the number of stages)",
    ),
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="number of data-parallel pipelines; each runs its part of the microbatches "
        "(default: 1; with --layout as many as the devices suffice for)",
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
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="TOOL:FILE",
        help="instead of stages, schedule and groups: megatron:FILE with Megatron-LM's own "
        "arguments, as a launch script has them, or torchtitan:FILE with torchtitan's "
        "configuration (TOML or JSON)",
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
    stages: StagesOption = None,
    schedule: ScheduleOption = None,
    pipeline_size: PipelineSizeOption = None,
    replicas: ReplicasOption = None,
    devices: DevicesOption = None,
    recompute: RecomputeOption = False,
    layout: LayoutOption = None,
    allow_overflow: OverflowOption = False,
    runtime: RunByOption = None,
    output: PlanOutputOption = Path("plan.json"),
    as_json: JsonOption = False,
) -> None:
    """Make a plan from a partition and schedule that you already run, without a search."""
    files = ProblemFiles(model, cluster, job, set_ or (), costs or (), runtime)
    listed = [] if devices is None else devices.split(",")
    names = None if devices is None else [name for part in listed if (name := part.strip())]
    parts = {
        "--stages": stages,
        "--schedule": schedule,
        "--pipeline-size": pipeline_size,
        "--recompute": recompute or None,
    }
    with user_errors(as_json):
        read = [layout and layout.partition(":")[2], stages, schedule]
        paths = [Path(text) for text in read if text and Path(text).suffix]
        require_outputs({"--output": output}, [*files.inputs, *paths])
        theirs = None
        if layout is None:
            found, loaded = _of_parts(files, parts, 1 if replicas is None else replicas, names)
        else:
            theirs = _layout(layout, files, parts, replicas, names)
            found, loaded = _of_layout(theirs, files, names)
        too_large = _save(found, output, allow_overflow=allow_overflow)
        notes = [] if theirs is None else [_set_by(theirs, found), *theirs.notes]
        if as_json:
            print_json(_data(found, output, too_large) | ({"notes": notes} if notes else {}))
        else:
            of_megatron = not str(stages).endswith(".json")
            if layout.startswith("megatron:") if layout else of_megatron:
                notes += _interleaving_notes(found)
            _show(found, output, [*too_large, *notes])
            say(_search_command(found, files, output))
            if not too_large:
                print_run_command(found.plan, output, loaded.text_problem)
        if loaded.compared is not None:
            say(loaded.compared, err=True)


def _of_parts(
    files: ProblemFiles, parts: Mapping[str, Any], replicas: int, names: Sequence[str] | None
) -> tuple[Adopted, LoadedProblem]:
    """Return the plan of stages and a schedule; they are read before the model is traced."""
    from planner.interop.adopted import adopted
    from planner.interop.division import divide

    if parts["--stages"] is None:
        raise PipeplanError("stages are missing; give --stages LAYOUT|FILE or --layout TOOL:FILE")
    stages, source = _given_stages(parts["--stages"])
    schedule = _given_schedule(parts["--schedule"])
    loaded = _loaded(files, files.runtime)
    found = adopted(
        loaded.problem,
        divide(loaded.problem.graph, stages, source),
        schedule=schedule,
        pipeline_size=parts["--pipeline-size"],
        replicas=replicas,
        devices=names,
        recompute_blocks=None if parts["--recompute"] else 0,
    )
    return found, loaded


def _layout(
    given: str,
    files: ProblemFiles,
    parts: Mapping[str, Any],
    replicas: int | None,
    names: Sequence[str] | None,
) -> RuntimeLayout:
    """Return the layout of another runtime's arguments.

    Raises:
        PipeplanError: if an option gives the same, or plans cannot express the layout.
    """
    from planner.cluster.cluster import Cluster
    from planner.interop.megatron import read_megatron_arguments
    from planner.interop.torchtitan import read_torchtitan_config

    readers = {"megatron": read_megatron_arguments, "torchtitan": read_torchtitan_config}
    tool, _, file = given.partition(":")
    if tool not in readers or not file:
        raise PipeplanError(f"--layout {given}: expected megatron:FILE or torchtitan:FILE")
    more = [name for name, value in parts.items() if value is not None]
    more += [f"--set {s}" for s in files.settings if s.partition("=")[0] in GROUP_FIELDS]
    if more:
        raise PipeplanError(
            f"{', '.join(more)}: --layout says this already; leave out one of the two"
        )
    devices = Cluster.load(files.cluster).devices if names is None else names
    return readers[tool](file).on(len(devices), replicas)


def _of_layout(
    layout: RuntimeLayout, files: ProblemFiles, names: Sequence[str] | None
) -> tuple[Adopted, LoadedProblem]:
    blocks = layout.blocks_messages and files.runtime == "megatron"
    fields = layout.job_fields(files.loaded_job())
    loaded = _loaded(files, "megatron-blocking" if blocks else files.runtime, fields, layout.source)
    return layout.adopted(loaded.problem, names), loaded


def _loaded(
    files: ProblemFiles,
    runtime: str | None,
    fields: Mapping[str, Any] | None = None,
    source: str = "",
) -> LoadedProblem:
    """Load the problem; ``--runtime`` predicts the plan and does not restrict its space."""
    rules = given_rules(runtime)
    loaded = replace(files, runtime=None).load(check=True, fields=fields, source=source)
    if rules is None:
        return loaded
    return replace(loaded, problem=replace(loaded.problem, runtime=rules))


def _given_stages(text: str) -> tuple[str | list[list[str]], str]:
    """Return the stages as a layout or lists of names, and where they are from."""
    from planner.interop.division import parse_layout
    from planner.records.document import read_json

    if text.endswith(".json"):
        return _name_lists(read_json(text), text), text
    parse_layout(text, "--stages")
    return text, "--stages"


def _name_lists(data: Any, source: str) -> list[list[str]]:
    if not isinstance(data, list) or not data:
        raise PipeplanError(f"{source}: {shorten(data)}: expected {EXAMPLE}")
    problems = [
        f"{source}[{i}]: {shorten(row)}: expected a list of names; the file is {EXAMPLE}"
        for i, row in enumerate(data)
        if not isinstance(row, list) or not all(isinstance(name, str) for name in row)
    ]
    if problems:
        raise PipeplanError(problems)
    return data


def _given_schedule(text: str | None) -> Schedule:
    from planner.interop.adopted import require_schedule
    from planner.interop.torch_pipelining import read_schedule_csv

    if text is not None and text.endswith(".csv"):
        return read_schedule_csv(Path(text))
    require_schedule(text)
    return text


def _save(found: Adopted, output: Path, *, allow_overflow: bool) -> list[str]:
    """Write a plan that holds, and return how it exceeds memory, if that is allowed.

    Raises:
        PipeplanError: if the plan does not hold.
    """
    from planner.interop.adopted import overflow_problems
    from planner.verification import save_valid
    from planner.verification.form import form_problems

    problems = list(form_problems(found.plan.on_groups, found.plan.parsed_orders()))
    too_large = overflow_problems(found)
    if problems or (too_large and not allow_overflow):
        raise PipeplanError([*problems, *too_large])
    if too_large:
        found.plan.save(output)
    else:
        save_valid(found.plan, output)
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


def _set_by(layout: RuntimeLayout, found: Adopted) -> str:
    """Return a note on the fields of the job that a layout set; switches only where they are on."""
    job = found.plan.job
    names = [name for i, name in enumerate(LAYOUT_FIELDS) if i < 4 or getattr(job, name)]
    fields = ", ".join(f"{name} = {json.dumps(getattr(job, name))}" for name in names)
    return f"{layout.source} sets {fields} in the job"


def _interleaving_notes(found: Adopted) -> list[str]:
    """Return a note if Megatron-LM would reject the number of microbatches."""
    size, share = len(set(found.pipelines[0])), found.plan.microbatches // len(found.pipelines)
    if found.schedule != "interleaved-1f1b" or share % size == 0:
        return []
    return [
        f"Megatron-LM needs a multiple of its {size} pipeline ranks for interleaving, but each "
        f"pipeline has {plural(share, 'microbatch', 'es')}"
    ]


def _show(found: Adopted, output: Path, notes: Sequence[str]) -> None:
    plan = found.plan
    show_plan(plan)
    unused = len(plan.cluster.device_names) - plan.world_size
    show(
        *([f"note: {plural(unused, 'device')} of the cluster are unused"] if unused else []),
        *(f"note: {note}" for note in notes),
        f"iteration time {format_seconds(plan.predicted.iteration_time_s)} with {found.schedule}; "
        "no lower bound, since nothing was searched",
        f"wrote {output}",
        f"explain it with: pipeplan explain {output}",
    )


def _search_command(found: Adopted, files: ProblemFiles, output: Path) -> str:
    """Return the command that searches for a better plan of the same job from this one."""
    before, now = files.loaded_job(), found.plan.job
    changed = [
        f"{name}={json.dumps(getattr(now, name))}"
        for name in LAYOUT_FIELDS
        if getattr(now, name) != getattr(before, name)
    ]
    same = replace(files, settings=[*files.settings, *changed])
    more = ["--warm-start", str(output), "-o", "better.json"]
    return f"search for a better plan with: {shlex.join(['pipeplan', 'plan', *same.words, *more])}"
