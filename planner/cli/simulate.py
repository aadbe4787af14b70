"""``pipeplan simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import completion
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
from planner.cli.output import named, print_json, show_fair_links, show_plan, user_errors
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

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.deviation import Comparison
    from planner.robustness import Noise


OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="write the plan with fresh predictions here"),
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="write a Chrome trace (opens in Perfetto)")
]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="MEASURED",
        help="compare with a timeline that the executor wrote (--timeline)",
        autocompletion=completion.plans,
    ),
]


def simulate(
    path: PlanArgument,
    output: OutputOption = None,
    trace_path: TraceOption = None,
    against: AgainstOption = None,
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
    with user_errors(as_json):
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
        else:
            noise = noise_of(**noises)
            _show_replay(path, output, trace_path, against, noise, as_json=as_json)


def _show_replay(
    path: Path,
    output: Path | None,
    trace_path: Path | None,
    against: Path | None,
    noise: Noise | None,
    *,
    as_json: bool,
) -> None:
    """Replay a plan, write what is asked for and print what it does."""
    from planner.artifacts.plan import Plan
    from planner.assemble import refresh

    loaded = Plan.load(path)
    with named(path):
        plan = refresh(loaded)
    comparison = comparison_of(plan, against)
    _write(plan, output, trace_path)
    if as_json:
        print_json(_data(plan, noise, comparison))
        return
    show_plan(plan)
    show_fair_links(plan)
    show_against(comparison)
    show_noise(plan, noise)
    if plan.provenance != loaded.provenance:
        typer.echo(f"bound covers {plan.provenance.bound_covers}")
    for written in (output, trace_path):
        if written is not None:
            typer.echo(f"wrote {written}")


def _write(plan: Plan, output: Path | None, trace_path: Path | None) -> None:
    from planner.report.chrome_trace import save_chrome_trace
    from planner.simulator import simulate_plan

    if output is not None:
        plan.save(output)
    if trace_path is not None:
        save_chrome_trace(simulate_plan(plan), trace_path)


def _data(plan: Plan, noise: Noise | None, comparison: Comparison | None) -> dict[str, Any]:
    """For programs."""
    from planner.fair_links import simulate_plan_fair_links

    return {
        **plan.predicted.model_dump(mode="json"),
        "iteration_time_fair_links_s": simulate_plan_fair_links(plan).iteration_time_s,
        **noise_report(plan, noise),
        **against_report(comparison),
    }
