"""``pipeplan plan``: the command, and the way from its options to a plan file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from planner.cli.models import ProblemRequest, loaded_problem
from planner.cli.options import (
    ClusterOption,
    CostsOption,
    DeterministicOption,
    EpochOption,
    ExpertParallelOption,
    JobOption,
    JsonOption,
    LogOption,
    MemoryMarginOption,
    ModelArgument,
    NoCheckOption,
    RuntimeOption,
    SeedOption,
    SequenceParallelOption,
    SetOption,
    TensorParallelOption,
    WorkersOption,
)
from planner.cli.output import print_json, say, show_plan, show_runtime, user_errors
from planner.cli.sync import needs_pipelines, require_sync, with_sync
from planner.errors import PipeplanError
from planner.search.settings import DEFAULT_WORKERS
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.problem import Problem
    from planner.search.result import HistoryRow, Result, StepRow
    from planner.search.settings import Preference


def show_result(
    result: Result,
    output: Path,
    text_problem: str | None,
    *,
    as_json: bool,
    has_margin: bool = False,
) -> None:
    """Print a result whose plan was written.

    Args:
        result: of the search.
        output: where its plan lies.
        text_problem: why the executor's text cannot train the model, if that is known.
        as_json: print JSON.
        has_margin: whether memory was left free on purpose: the rest may be filled.
    """
    from planner.report.summary import space_lines

    if as_json:
        print_json(_data(result, output))
        return
    _print_unjoined(result.unjoined_devices)
    show_plan(result.plan)
    say(result.summary())
    for line in space_lines(result.plan):
        say(line)
    show_runtime(result.plan)
    memory = () if has_margin else memory_lines(result.plan)
    for line in (*memory, *_about_gap(result)):
        say(line)
    say(f"wrote {output}")
    print_run_command(result.plan, output, text_problem)


LITTLE = 0.06
"""Share of a device's memory; a plan that leaves less of it free is warned of."""


def memory_lines(plan: Plan) -> list[str]:
    """Return a line on devices that the plan fills nearly; none where all have room."""
    cluster = plan.on_groups.cluster
    left = {
        name: 1 - row.peak_memory_bytes / cluster.device_type(name).capacity_bytes
        for name, row in plan.predicted.devices.items()
    }
    full = {name: share for name, share in left.items() if share < LITTLE}
    if not full:
        return []
    least = min(full, key=lambda name: full[name])
    return [
        f"warning: memory is nearly full: {plural(len(full), 'device')} with less than "
        f"{LITTLE:.0%} of it free, {least} with {full[least]:.1%}; fragmentation or another "
        "process may exceed it: plan again with --memory-margin 6%"
    ]


def _data(result: Result, output: Path) -> dict[str, Any]:
    """Return the JSON output."""
    from planner.report.summary import throughput_data

    return {
        "status": result.status,
        "ended": result.ended,
        "shortcoming": result.shortcoming(),
        "plan": str(output),
        **result.plan.predicted.model_dump(mode="json"),
        "throughput": throughput_data(result.plan),
        "runtime": result.plan.job.runtime and result.plan.runtime.name,
        "bound_covers": result.plan.provenance.bound_covers.model_dump(mode="json"),
        "unjoined_devices": list(result.unjoined_devices),
        "robustness": None if result.robustness is None else asdict(result.robustness),
        "simplicity": None if result.simplicity is None else asdict(result.simplicity),
        "length_choice": None if result.lengths is None else asdict(result.lengths),
        "history": [row._asdict() for row in result.history],
        "steps": [row._asdict() for row in result.steps],
    }


def _print_unjoined(devices: Sequence[str]) -> None:
    """Print which devices the plan could not use because no route joins them."""
    from planner.plan.operations import compress_devices

    if devices:
        say(
            f"not used: {compress_devices(devices)}, {plural(len(devices), 'device')}, since no "
            "path of links joins them to the devices of the plan; add links to the cluster file"
        )


def _about_gap(result: Result) -> Iterator[str]:
    """Yield a sentence on what the gap includes, if there is something to say."""
    if result.robustness is not None and not result.robustness.is_fastest:
        yield "the gap refers to this plan's time; a faster but less robust plan is known"
    elif result.simplicity is not None and not result.simplicity.is_fastest:
        yield "the gap refers to this plan's time; a faster but less simple plan is known"
    elif needs_pipelines(result.plan.sync.strategy):
        yield (
            "the time assumes synchronous pipelines, and the bound covers plans of any form: the "
            "gap includes the cost of restricting the plan to data-parallel pipelines"
        )
    elif result.status != "optimal" and result.gap is not None:
        yield "a better plan may exist within the gap; none is known"


def print_run_command(plan: Plan, output: Path, text_problem: str | None) -> None:
    """Print how to run a plan, and on what data, if its model is known."""
    from planner.plan.run_command import data_line, run_commands

    commands = run_commands(plan, output, text_problem)
    if commands is not None:
        for line in (*commands.lines("run it"), data_line(text_problem)):
            say(line)


def progress_table(quiet: bool) -> Callable[[HistoryRow], None]:
    """Return a function that prints rows of progress below a heading."""
    if quiet:
        return lambda row: None
    headings = [f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}"]

    def show(row: HistoryRow) -> None:
        while headings:
            say(headings.pop(), err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        say(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)

    return show


def step_lines(steps: Sequence[StepRow]) -> list[str]:
    """Return a table of what each step of a search took and brought."""
    lines = [f"{'step':<24}  {'took':>8}  {'layouts':>9}  {'iteration':>12}  {'bound':>12}"]
    for row in steps:
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        time = time if math.isfinite(row.iteration_time_s) else "-"
        took = f"{row.seconds:.1f}s"
        lines.append(f"{row.name:<24}  {took:>8}  {row.layouts:>9,}  {time:>12}  {bound:>12}")
    return lines


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for; None where an option was not given.

    Attributes:
        problem: what to plan for.
        warm_starts: files of earlier plans.
        robust: whether the plan should keep its time under noise.
        prefer, prefer_within: see :func:`planner.search.solve.solve`.
        sync: strategy of synchronisation with its options, or ``choose``.
        log: whether to show what each step of the search took and brought.
    """

    problem: ProblemRequest
    warm_starts: tuple[Path, ...]
    robust: bool
    prefer: Preference
    prefer_within: float
    sync: str | None
    log: bool = False

    @property
    def chooses(self) -> bool:
        """Whether plans near the fastest are compared by something else than time."""
        return self.robust or self.prefer != "fast"


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search, see :func:`planner.search.solve.solve`."""

    time_limit_s: float
    gap_limit: float
    seed: int
    workers: int
    deterministic: bool


def make_plan(
    request: PlanRequest, settings: SearchSettings, output: Path, *, as_json: bool
) -> None:
    """Search for a plan, write it and show it.

    Args:
        request: what a plan is wanted of.
        settings: of the search.
        output: plan file.
        as_json: print JSON, and no progress.

    Raises:
        PipeplanError: naming what is wrong with the input, or why there is no plan.
    """
    from planner.prediction import load_plan
    from planner.verification import save_valid

    _require_possible(request, settings, output)
    warm_starts = [load_plan(path) for path in request.warm_starts]
    loaded = loaded_problem(request.problem)
    problem = loaded.problem
    _print_unusable(problem, dict(zip(request.warm_starts, warm_starts, strict=True)))
    found = _search(problem, request, settings, warm_starts, quiet=as_json)
    plan, reason = with_sync(found.plan, request.sync)
    save_valid(plan, output)
    if request.chooses and found.robustness is None and found.simplicity is None:
        say("note: interrupted before plans near the fastest were compared", err=True)
    found, has_margin = replace(found, plan=plan), request.problem.memory_margin is not None
    show_result(found, output, loaded.text_problem, as_json=as_json, has_margin=has_margin)
    if request.log and not as_json:
        for line in step_lines(found.steps):
            say(line)
    if loaded.compared is not None:
        say(loaded.compared, err=True)
    if reason and not as_json:
        say(f"synchronisation strategy: {reason}")
    shortcoming = found.shortcoming()
    if shortcoming is not None and not as_json:
        say(shortcoming)


def _require_possible(request: PlanRequest, settings: SearchSettings, output: Path) -> None:
    """Refuse wrong settings before the model is traced, which may take long."""
    from planner.records.document import require_file_path
    from planner.search.settings import check_preference, check_settings

    check_settings(settings.time_limit_s, settings.gap_limit, settings.seed, settings.workers)
    check_preference(request.prefer, request.prefer_within, is_robust=request.robust)
    require_file_path(output)
    require_sync(request.sync)
    _require_runtime(request)
    if request.chooses and needs_pipelines(request.sync):
        option = "--robust" if request.robust else f"--prefer {request.prefer}"
        raise PipeplanError(
            f"{option}: compares plans under a synchronous strategy, and {request.sync} is not "
            f"one; remove {option}"
        )
    keep_inputs(output, request.problem.inputs)


def _require_runtime(request: PlanRequest) -> None:
    from planner.cli.models import given_rules

    rules = given_rules(request.problem.runtime)
    if rules is None or rules.expresses == "pipeplan" or not needs_pipelines(request.sync):
        return
    raise PipeplanError(
        f"--sync {request.sync}: {rules.name} reduces gradients over all pipelines in every "
        "iteration; leave --sync out, or plan for pipeplan"
    )


def keep_inputs(output: Path, inputs: list[Path]) -> None:
    """Refuse to write the plan over one of the files it is made from.

    Raises:
        PipeplanError: naming the file.
    """
    for path in inputs:
        if _is_same_file(path, output):
            raise PipeplanError(
                f"--output {output}: this is an input file of the command; choose another name"
            )


def keep_warm_starts(output: Path, request: PlanRequest) -> None:
    """Refuse to write over a plan that the search starts from, unless it was named with ``-o``.

    Raises:
        PipeplanError: naming the file.
    """
    for path in request.warm_starts:
        if _is_same_file(path, output):
            raise PipeplanError(
                f"--warm-start {path}: would be overwritten; give -o {path} explicitly if you want "
                f"that, or choose another name"
            )


def keep_plan(output: Path) -> None:
    """Refuse to write over a file that was not named with ``-o``, before any search.

    Raises:
        PipeplanError: naming the file.
    """
    if output.exists():
        raise PipeplanError(
            f"{output}: exists already; name another file with -o, or give --overwrite"
        )


def _is_same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _print_unusable(problem: Problem, plans: dict[Path, Plan]) -> None:
    """Print which warm starts cannot be used."""
    from planner.search.finish import starts_of

    if problem.job.tensor_parallel != 1:
        return  # A plan may fit one size of groups and not another.
    for path, earlier in plans.items():
        if not any(starts_of(problem, [earlier])):
            say(
                f"note: {path} is ignored: its stages are not consecutive layers of this model, or "
                f"one of them has no device in this cluster",
                err=True,
            )


def _search(
    problem: Problem,
    request: PlanRequest,
    settings: SearchSettings,
    warm_starts: Sequence[Plan],
    *,
    quiet: bool,
) -> Result:
    from planner.search.data_parallel import solve_data_parallel
    from planner.search.solve import solve

    aside = needs_pipelines(request.sync)
    chosen = partial(
        solve,
        robust=request.robust,
        prefer=request.prefer,
        prefer_within=request.prefer_within,
    )
    search = solve_data_parallel if aside else chosen
    progress = progress_table(quiet=quiet)
    return search(problem, **asdict(settings), progress=progress, warm_starts=warm_starts)


ShardOptimizerOption = Annotated[
    bool,
    typer.Option(
        "--shard-optimizer",
        help="replicas of a stage share the optimizer's state, ZeRO-1 (default: as the job says)",
    ),
]
ShardParametersOption = Annotated[
    bool,
    typer.Option(
        "--shard-parameters",
        help="replicas of a stage also divide its weights and gradients, ZeRO-3 (FSDP), in equal "
        "pipelines with whole backwards (default: as the job says)",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="plan file to write (default: plan.json)")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="without -o: replace plan.json if it exists")
]
DEFAULT_OUTPUT = Path("plan.json")
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="stop after this time; with --deterministic in CP-SAT's deterministic seconds, each "
        "of which takes 1 to 10 s",
    ),
]
GapOption = Annotated[
    float, typer.Option("--gap", help="stop when the gap (time / bound - 1) is at most this")
]
WarmStartOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--warm-start",
        metavar="PLAN",
        help="also start from the stages of this plan; may be repeated",
    ),
]
RobustOption = Annotated[
    bool,
    typer.Option(
        "--robust",
        help="prefer a plan that is robust to noise (jitter 0.05) and at most 2 % slower without "
        "noise",
    ),
]
PreferOption = Annotated[
    str,
    typer.Option(
        metavar="fast|simple",
        help="simple: of the plans about as fast as the fastest found, the one that is node-"
        "aligned, has fewest stages, then uneven replicas, and a published schedule",
    ),
]
PreferWithinOption = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="with --prefer simple: the plan may take longer than the fastest found by this share",
    ),
]
SyncOption = Annotated[
    str | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="how replicas agree, all_reduce unless given; choose: what suits the plan's "
        "pipelines, by simulation; one between pipelines makes a plan of pipelines",
    ),
]


def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    runtime: RuntimeOption = None,
    tensor_parallel: TensorParallelOption = None,
    sequence_parallel: SequenceParallelOption = False,
    expert_parallel: ExpertParallelOption = False,
    shard_optimizer: ShardOptimizerOption = False,
    shard_parameters: ShardParametersOption = False,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    time_limit: TimeLimitOption = 30.0,
    gap: GapOption = 1e-4,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    warm_start: WarmStartOption = None,
    deterministic: DeterministicOption = False,
    robust: RobustOption = False,
    prefer: PreferOption = "fast",
    prefer_within: PreferWithinOption = 0.01,
    sync: SyncOption = None,
    memory_margin: MemoryMarginOption = None,
    epoch_samples: EpochOption = None,
    no_check: NoCheckOption = False,
    log: LogOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove a lower bound on the iteration time."""
    request = PlanRequest(
        problem=ProblemRequest(
            model,
            cluster,
            job,
            tuple(set_ or ()),
            tuple(costs or ()),
            runtime,
            tensor_parallel,
            sequence_parallel,
            epoch_samples,
            shard_optimizer=shard_optimizer,
            expert_parallel=expert_parallel,
            shard_parameters=shard_parameters,
            check=not no_check,
            memory_margin=memory_margin,
        ),
        warm_starts=tuple(warm_start or ()),
        robust=robust,
        prefer=cast("Preference", prefer),  # Checked before it is used.
        prefer_within=prefer_within,
        sync=sync,
        log=log,
    )
    settings = SearchSettings(time_limit, gap, seed, workers, deterministic)
    with user_errors(as_json):
        if output is None and not overwrite:
            keep_warm_starts(DEFAULT_OUTPUT, request)
            keep_plan(DEFAULT_OUTPUT)
        make_plan(request, settings, output or DEFAULT_OUTPUT, as_json=as_json)
