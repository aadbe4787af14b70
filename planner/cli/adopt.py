"""``pipeplan adopt``: a plan from a partition and schedule that somebody already runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from planner.cli.output import keep_inputs, print_json, say, show, show_plan, user_errors
from planner.cli.plan import print_run_command
from planner.cli.problems import LoadedProblem, ProblemFiles, given_rules
from planner.errors import PipeplanError, shorten
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.interop.adopted import Adopted, Schedule
    from planner.interop.layout import RuntimeLayout
    from planner.plan.problem import Problem

EXAMPLE = 'a list of lists of names, such as [["wte", "h.0"], ["h.1", "ln_f", "lm_head"]]'


def adopt(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            metavar="LAYOUT|FILE",
            help="stages in the format of Megatron-LM's --pipeline-model-parallel-layout, such as "
            "'Et*3|(tt|)*4,L', or a JSON file with a list of layer or module names per stage, like "
            "torchtitan's module_fqns_per_model_part",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME|FILE",
            help="gpipe, 1f1b, interleaved-1f1b, looped-breadth-first, eager-1f1b, pe, zb-h1, "
            "zb-h2, zb-auto, zb-v or dualpipe-v (the last two need two stages per rank in a V), or "
            "a CSV schedule of torch.distributed.pipelining, which also places the stages "
            "(default: 1f1b, or interleaved-1f1b with several stages per rank)",
        ),
    ] = None,
    pipeline_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-size",
            metavar="N",
            help="pipeline ranks; stage i is on rank i % N (default: the number of stages)",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            metavar="R",
            help="number of data-parallel pipelines; each runs its part of the microbatches "
            "(default: 1; with --layout as many as the devices suffice for)",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="NAME,…",
            help="devices in rank order, those of a tensor-parallel group next to each other, the "
            "replicas of pipeline rank 0 first (default: the cluster's order)",
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="full activation checkpointing: recompute every block"),
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="TOOL:FILE",
            help="instead of stages, schedule and groups: megatron:FILE with Megatron-LM's own "
            "arguments, as a launch script has them, or torchtitan:FILE with torchtitan's "
            "configuration (TOML or JSON)",
        ),
    ] = None,
    allow_overflow: Annotated[
        bool,
        typer.Option(
            "--allow-overflow",
            help="write the plan even if it exceeds memory, for `explain` and `simulate`",
        ),
    ] = False,
    runtime: RunByOption = None,
    output: PlanOutputOption = Path("plan.json"),
    as_json: JsonOption = False,
) -> None:
    """Make a plan from a partition and schedule that you already run, without a search."""
    files = ProblemFiles(model, cluster, job, set_ or (), costs or ())
    names = None if devices is None else [name.strip() for name in devices.split(",")]
    parts = {
        "--stages": stages,
        "--schedule": schedule,
        "--pipeline-size": pipeline_size,
        "--recompute": recompute or None,
    }
    request = AdoptRequest(files, parts, replicas, names and list(filter(None, names)), layout)
    with user_errors(as_json):
        from planner.records.document import require_file_path
        from planner.verification import save_valid

        require_file_path(output)
        keep_inputs(output, request.inputs)
        found, loaded, theirs = request.adopted(runtime)
        too_large = _checked(found, allow_overflow=allow_overflow)
        if too_large:
            found.plan.save(output)
        else:
            save_valid(found.plan, output)
        notes = _layout_notes(found, theirs)
        if as_json:
            print_json(_data(found, output, too_large) | ({"notes": notes} if notes else {}))
        else:
            more = _interleaving_notes(found) if request.is_megatron else []
            _show(found, output, [*too_large, *notes, *more])
            say(_search_command(found, replace(files, runtime=runtime), output))
            if not too_large:
                print_run_command(found.plan, output, loaded.text_problem)
        if loaded.compared is not None:
            say(loaded.compared, err=True)


@dataclass(frozen=True)
class AdoptRequest:
    """What a plan is put together from; None where an option was not given.

    Attributes:
        files: the problem.
        parts: options that give the layout's parts, by name.
        replicas: equal pipelines.
        names: devices in the order of ranks.
        layout: another runtime and the file of its arguments, instead of the parts.
    """

    files: ProblemFiles
    parts: dict[str, Any]
    replicas: int | None
    names: list[str] | None
    layout: str | None

    @property
    def inputs(self) -> list[Path]:
        """The files that the plan is made from."""
        others = [] if self.layout is None else [Path(self.layout.partition(":")[2])]
        named = [Path(str(self.parts[name])) for name in ("--stages", "--schedule")]
        return [*self.files.inputs, *others, *(path for path in named if path.suffix)]

    @property
    def is_megatron(self) -> bool:
        """Whether the layout is one of Megatron-LM."""
        if self.layout is not None:
            return self.layout.startswith("megatron:")
        return not str(self.parts["--stages"]).endswith(".json")

    def adopted(self, runtime: str | None) -> tuple[Adopted, LoadedProblem, RuntimeLayout | None]:
        """Assemble the plan; what is quick to read is read before the model is traced."""
        if self.layout is None:
            return (*self._of_parts(runtime), None)
        layout = self._layout(self.layout)
        fields = layout.job_fields(self.files.loaded_job())
        loaded = self.files.load(check=True, fields=fields, source=layout.source)
        blocks = layout.blocks_messages and runtime == "megatron"
        problem = _run_by(loaded.problem, "megatron-blocking" if blocks else runtime)
        return layout.adopted(problem, self.names), loaded, layout

    def _of_parts(self, runtime: str | None) -> tuple[Adopted, LoadedProblem]:
        """Assemble the plan of stages and a schedule that were given by themselves."""
        from planner.interop.adopted import adopted
        from planner.interop.division import divide

        if self.parts["--stages"] is None:
            raise PipeplanError(
                "stages are missing; give --stages LAYOUT|FILE or --layout TOOL:FILE"
            )
        stages, source = _given_stages(self.parts["--stages"])
        schedule = _given_schedule(self.parts["--schedule"])
        loaded = self.files.load(check=True)
        problem = _run_by(loaded.problem, runtime)
        found = adopted(
            problem,
            divide(problem.graph, stages, source),
            schedule=schedule,
            pipeline_size=self.parts["--pipeline-size"],
            replicas=1 if self.replicas is None else self.replicas,
            devices=self.names,
            recompute_blocks=None if self.parts["--recompute"] else 0,
        )
        return found, loaded

    def _layout(self, given: str) -> RuntimeLayout:
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
        more = [name for name, value in self.parts.items() if value is not None]
        more += [f"--set {text}" for text in self.files.settings if _is_of_layout(text)]
        if more:
            raise PipeplanError(
                f"{', '.join(more)}: --layout says this already; leave out one of the two"
            )
        cluster = Cluster.load(self.files.cluster)
        count = len(cluster.devices if self.names is None else self.names)
        return readers[tool](file).on(count, self.replicas)


def _is_of_layout(setting: str) -> bool:
    return setting.startswith(("tensor_parallel=", "sequence_parallel=", "expert_parallel="))


def _run_by(problem: Problem, runtime: str | None) -> Problem:
    """Return the problem under the rules of ``--runtime``, if that was given."""
    rules = given_rules(runtime)
    return problem if rules is None else replace(problem, runtime=rules)


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


def _checked(found: Adopted, *, allow_overflow: bool) -> list[str]:
    """Return the memory problems of a plan if they are allowed.

    Raises:
        PipeplanError: if the plan does not hold for another reason, or it is not allowed.
    """
    from planner.interop.adopted import overflow_problems
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
    show_plan(found.plan)
    plan = found.plan
    unused = len(plan.cluster.device_names) - plan.world_size
    if unused:
        say(f"note: {plural(unused, 'device')} of the cluster are unused")
    show(
        *(f"note: {note}" for note in notes),
        f"iteration time {format_seconds(plan.predicted.iteration_time_s)} with {found.schedule}; "
        "no lower bound, since nothing was searched",
        f"wrote {output}",
        f"explain it with: pipeplan explain {output}",
    )


def _search_command(found: Adopted, files: ProblemFiles, output: Path) -> str:
    """Return the command that searches for a better plan of the same job from this one."""
    before, now = files.loaded_job(), found.plan.job
    names = (
        *("samples_per_microbatch", "microbatches", "tensor_parallel", "sequence_parallel"),
        *("shard_optimizer", "expert_parallel", "recompute_attention"),
    )
    changed = [
        f"{name}={json.dumps(getattr(now, name))}"
        for name in names
        if getattr(now, name) != getattr(before, name)
    ]
    same = replace(files, settings=[*files.settings, *changed])
    more = ["--warm-start", str(output), "-o", "better.json"]
    return f"search for a better plan with: {shlex.join(['pipeplan', 'plan', *same.words, *more])}"
