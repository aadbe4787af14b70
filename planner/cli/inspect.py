"""The commands that read a plan: ``pipeplan verify | simulate | explain | plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.against import against_report, comparison_of, show_against
from planner.cli.noise import (
    JitterOption,
    SamplesOption,
    SeedOption,
    SlowFactorOption,
    SlowProbabilityOption,
    TransferJitterOption,
    noise_of,
    noise_report,
    show_noise,
)
from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import print_json, show_fair_links, show_plan, user_errors
from planner.cli.sync import (
    IterationsOption,
    JobsOption,
    LeastGainOption,
    SeedsOption,
    SlownessOption,
    SyncOption,
    SyncTraceOption,
    WorkersOption,
    show_sync,
    sync_request_of,
)
from planner.errors import PipeplanError


def verify(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Check that a plan holds; exit status 1 and the reasons if it does not."""
    with user_errors():
        from planner.artifacts.plan import Plan
        from planner.verifier import verify as find_problems

        try:
            problems = find_problems(Plan.load(path))
        except PipeplanError as error:
            problems = list(error.problems)
        if as_json:
            print_json({"plan": str(path), "valid": not problems, "problems": problems})
        elif problems:
            raise PipeplanError(problems)
        else:
            typer.echo(f"{path}: holds")
        if problems:
            raise typer.Exit(1)


def simulate(
    path: PlanArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the plan with fresh predictions here"),
    ] = None,
    trace_path: Annotated[
        Path | None, typer.Option("--trace", help="write a Chrome trace (opens in Perfetto)")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="MEASURED",
            help="compare with a timeline that the executor wrote (--timeline)",
        ),
    ] = None,
    jitter: JitterOption = None,
    transfer_jitter: TransferJitterOption = None,
    slow_probability: SlowProbabilityOption = None,
    slow_factor: SlowFactorOption = None,
    samples: SamplesOption = None,
    seed: SeedOption = None,
    sync: SyncOption = None,
    workers: WorkersOption = None,
    iterations: IterationsOption = None,
    slowness: SlownessOption = None,
    seeds: SeedsOption = None,
    jobs: JobsOption = None,
    sync_trace: SyncTraceOption = None,
    least_gain: LeastGainOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a plan and show what every device does, and how well it keeps its time."""
    with user_errors():
        noises = {
            "jitter": jitter,
            "transfer_jitter": transfer_jitter,
            "slow_probability": slow_probability,
            "slow_factor": slow_factor,
            "samples": samples,
            "seed": seed,
        }
        request = sync_request_of(
            sync,
            {"trace": trace_path, "against": against, **noises},
            workers=workers,
            iterations=iterations,
            slowness=slowness,
            seeds=seeds,
            jobs=jobs,
            sync_trace=sync_trace,
            least_gain=least_gain,
        )
        if request is not None:
            show_sync(path, request, output, as_json=as_json)
            return
        from planner.artifacts.plan import Plan
        from planner.assemble import refresh
        from planner.fair_links import simulate_plan_fair_links
        from planner.report.chrome_trace import save_chrome_trace
        from planner.simulator import simulate_plan

        noise = noise_of(**noises)
        loaded = Plan.load(path)
        the_plan = refresh(loaded)
        comparison = comparison_of(the_plan, against)
        if output is not None:
            the_plan.save(output)
        if trace_path is not None:
            save_chrome_trace(simulate_plan(the_plan), trace_path)
        if as_json:
            predicted = the_plan.predicted.model_dump(mode="json")
            shared_s = simulate_plan_fair_links(the_plan).iteration_time_s
            reports = {"iteration_time_fair_links_s": shared_s, **noise_report(the_plan, noise)}
            reports |= against_report(comparison)
            print_json({**predicted, **reports})
            return
        show_plan(the_plan)
        show_fair_links(the_plan)
        show_against(comparison)
        show_noise(the_plan, noise)
        if the_plan.provenance != loaded.provenance:
            typer.echo(f"bound covers {the_plan.provenance.bound_covers}")
        for written in (output, trace_path):
            if written is not None:
                typer.echo(f"wrote {written}")


def explain(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Say what binds a plan: which device, which link, memory or the critical path."""
    with user_errors():
        from planner.artifacts.plan import Plan
        from planner.explain import explain as explain_timeline
        from planner.report.explanation import explanation_data, explanation_lines
        from planner.report.rests_on import rests_on_lines
        from planner.rests_on import rests_on_path
        from planner.verifier import replay

        explanation = explain_timeline(replay(Plan.load(path)))
        if as_json:
            print_json(explanation_data(explanation))
            return
        shares = rests_on_path(explanation.pipeline, explanation.critical_path)
        for line in (*explanation_lines(explanation), *rests_on_lines(shares)):
            typer.echo(line)


def plot(
    path: PlanArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="picture to write: .png or .svg")
    ] = Path("plan.png"),
    memory: Annotated[bool, typer.Option("--memory", help="memory over time instead")] = False,
) -> None:
    """Draw a plan as a Gantt chart, or its memory over time."""
    with user_errors():
        from planner.artifacts.plan import Plan
        from planner.report.gantt import save_gantt
        from planner.report.memory_plot import save_memory
        from planner.verifier import replay

        the_plan = Plan.load(path)
        timeline = replay(the_plan)
        if memory:
            save_memory(timeline, output)
        else:
            save_gantt(timeline, output, title=f"{the_plan.model.name} on {the_plan.cluster.name}")
        typer.echo(f"wrote {output}")
