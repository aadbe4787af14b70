"""``pipeplan simulate``: predictions, also under noise or compared with a measurement."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import AgainstOption, JsonOption, PlanArgument, RunByOption
from planner.cli.output import named, print_json, say, show, show_plan, user_errors
from planner.cli.sync import show_sync
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.simulation.noise import Noise

ITERATIONS, STEADY = 200, "steady"


TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="write a Chrome trace for Perfetto")
]
NoiseOption = Annotated[
    str | None,
    typer.Option(
        "--noise",
        metavar="NAME=VALUE,…",
        help="simulate with random durations: jitter=0.05 (their relative standard "
        "deviation), transfer_jitter, slow_probability (of a device in an iteration), "
        "slow_factor, samples, seed",
    ),
]
SyncOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="simulate training of the plan's pipelines under a synchronisation strategy; may "
        "be repeated; all: every strategy; choose: recommend one",
    ),
]
PipelinesOption = Annotated[
    int | None,
    typer.Option(
        "--pipelines",
        metavar="N",
        help="with --sync: copies of the first pipeline (default: the plan's own pipelines)",
    ),
]
IterationsOption = Annotated[
    int | None,
    typer.Option(
        "--iterations", metavar="N", help="with --sync: iterations per pipeline (default: 200)"
    ),
]
SlownessOption = Annotated[
    str | None,
    typer.Option(
        "--slowness",
        metavar="TRACE",
        help="with --sync: slow:PIPELINExFACTOR,…, sleep:PROBABILITY:SECONDS, drift[:SPREAD] "
        "or fault:PIPELINE:LEAVES_S[:RETURNS_S], joined by +; after a fault the other "
        "pipelines continue, even under synchronous strategies, where a real job would end",
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="N",
        help="with --sync: seeds to average over (default: 1; with --sync choose 8)",
    ),
]
SyncTraceOption = Annotated[
    Path | None,
    typer.Option(
        "--sync-trace",
        metavar="MEASURED",
        help="with --sync: take compute times, links and overheads from a trace written by the "
        "executor's --sync-trace",
    ),
]


def simulate(
    path: PlanArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the plan with new predictions to this file"),
    ] = None,
    trace_path: TraceOption = None,
    against: AgainstOption = None,
    noise: NoiseOption = None,
    runtime: RunByOption = None,
    sync: SyncOption = None,
    pipelines: PipelinesOption = None,
    iterations: IterationsOption = None,
    slowness: SlownessOption = None,
    seeds: SeedsOption = None,
    sync_trace: SyncTraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan: times and memory, also under noise or other synchronisation strategies."""
    plain = {"--output": output, "--trace": trace_path, "--against": against, "--noise": noise}
    of_sync = {
        **{"--pipelines": pipelines, "--iterations": iterations, "--slowness": slowness},
        **{"--seeds": seeds, "--sync-trace": sync_trace},
    }
    with user_errors(as_json):
        if not sync:
            _refuse(of_sync, "without --sync; add --sync all")
            _simulate(path, output, trace_path, against, noise, runtime, as_json=as_json)
            return
        _refuse({**plain, "--runtime": runtime}, "together with --sync; remove one")
        show_sync(
            path,
            sync,
            pipelines=pipelines,
            iterations=ITERATIONS if iterations is None else iterations,
            slowness=STEADY if slowness is None else slowness,
            seeds=seeds,
            sync_trace=sync_trace,
            as_json=as_json,
        )


def _refuse(options: dict[str, Any], why: str) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        raise PipeplanError(f"{name}: {value} has no effect {why}" for name, value in given.items())


def noise_of(text: str) -> Noise:
    """Return the noise of ``--noise``.

    Raises:
        PipeplanError: for an unknown name, a value that is no number, out of range or without
            effect.
    """
    from planner.simulation.noise import Noise

    kinds = {field.name: int if field.type == "int" else float for field in fields(Noise)}
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            given[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise PipeplanError(
                f"--noise {part}: expected NAME=VALUE, such as jitter=0.05; there are "
                f"{', '.join(kinds)}"
            ) from None
    if "slow_factor" in given and "slow_probability" not in given:
        raise PipeplanError(
            f"--noise slow_factor={given['slow_factor']}: has no effect while no device is slow; "
            "give slow_probability too"
        )
    if given.keys() <= {"samples", "seed"}:
        raise PipeplanError(f"--noise {text}: has no effect without noise; give jitter too")
    return Noise(**{"jitter": 0.0, **given})


def _simulate(
    path: Path,
    output: Path | None,
    trace_path: Path | None,
    against: Path | None,
    noise_text: str | None,
    runtime: str | None,
    *,
    as_json: bool,
) -> None:
    """Simulate a plan, write the requested files and print the results."""
    from planner.analysis.deviation import compare_with_measured
    from planner.measured.timeline import MeasuredTimeline
    from planner.prediction import load_plan, refresh
    from planner.report.chrome_trace import save_chrome_trace
    from planner.report.deviation import comparison_data, comparison_view
    from planner.report.summary import noise_table, overflow_lines, runtime_lines, throughput_data
    from planner.simulation.noise import times_under_noise
    from planner.simulation.simulator import simulate_plan
    from planner.verification import save_valid

    noise = None if noise_text is None else noise_of(noise_text)
    loaded = load_plan(path, runtime)
    with named(path):
        plan = refresh(loaded)
    timeline, found = simulate_plan(plan), None
    if against is not None:
        measured = MeasuredTimeline.load(against)
        with named(against):
            found = compare_with_measured(plan, timeline, measured)
    if output is not None:
        save_valid(plan, output)
    if trace_path is not None:
        save_chrome_trace(timeline, trace_path)
    times = None if noise is None else times_under_noise(timeline, noise)
    if as_json:
        data = {**plan.predicted.model_dump(mode="json"), "throughput": throughput_data(plan)}
        if noise is not None and times is not None:
            data["under_noise"] = {**asdict(noise), **asdict(times)}
        print_json(data if found is None else {**data, "against": comparison_data(found)})
        return
    show_plan(plan)
    show(*overflow_lines(plan), *runtime_lines(plan.runtime))
    show(*([] if found is None else comparison_view(found)))
    if noise is not None and times is not None:
        show(noise_table(noise, times))
    if plan.provenance != loaded.provenance:
        say(f"the bound covers {plan.provenance.bound_covers}")
    show(*(f"wrote {written}" for written in (output, trace_path) if written is not None))
