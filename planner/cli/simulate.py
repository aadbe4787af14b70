"""``pipeplan simulate``: predictions, also under noise or compared with a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.models import with_epoch
from planner.cli.options import AgainstOption, EpochOption, JsonOption, PlanArgument, RunByOption
from planner.cli.output import (
    named,
    print_json,
    say,
    show,
    show_plan,
    show_runtime,
    user_errors,
)
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

if TYPE_CHECKING:
    from planner.analysis.deviation import Comparison
    from planner.plan.plan import Plan
    from planner.simulation.noise import Noise


def comparison_of(plan: Plan, path: Path | None) -> Comparison | None:
    """Compare the plan's simulation with the measurement in a file; None without a file.

    Raises:
        PipeplanError: if the file is no measurement, or one of another plan.
    """
    from planner.analysis.deviation import compare_with_measured
    from planner.measured.timeline import MeasuredTimeline
    from planner.simulation.simulator import simulate_plan

    if path is None:
        return None
    measured = MeasuredTimeline.load(path)
    with named(path):
        return compare_with_measured(plan, simulate_plan(plan), measured)


def against_report(comparison: Comparison | None) -> dict[str, Any]:
    """Return the comparison as plain data, if there is one."""
    from planner.report.deviation import comparison_data

    return {} if comparison is None else {"against": comparison_data(comparison)}


def show_against(comparison: Comparison | None) -> None:
    """Print the comparison, if any."""
    from planner.report.deviation import comparison_view

    if comparison is not None:
        show(*comparison_view(comparison))


JitterOption = Annotated[
    float | None,
    typer.Option(
        "--jitter",
        metavar="FRACTION",
        help="simulate with random durations of this relative standard deviation (0.05 is 5 %)",
    ),
]
TransferJitterOption = Annotated[
    float | None,
    typer.Option(
        "--transfer-jitter",
        metavar="FRACTION",
        help="the same for transfers and all-reduces (default: --jitter)",
    ),
]
SlowProbabilityOption = Annotated[
    float | None,
    typer.Option(
        "--slow-probability",
        metavar="P",
        help="probability that a device is slow during an iteration",
    ),
]
SlowFactorOption = Annotated[
    float | None,
    typer.Option(
        "--slow-factor",
        metavar="X",
        help="factor by which operations of a slow device take longer (default: 1.5)",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples", metavar="N", help="iterations to simulate under noise (default: 1000)"
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="seed of the noise (default: 0)")
]


def noise_of(**options: Any) -> Noise | None:
    """Return the noise that options describe; None if they describe none.

    Args:
        options: the fields of a noise, None where the user gave none.

    Raises:
        PipeplanError: if a value is out of range, or an option has no effect without another one.
    """
    from planner.simulation.noise import Noise

    given = {name: value for name, value in options.items() if value is not None}
    _refuse_without_effect(given)
    return Noise(**{"jitter": 0.0, **given}) if given else None


def _refuse_without_effect(given: Mapping[str, Any]) -> None:
    if "slow_factor" in given and "slow_probability" not in given:
        raise PipeplanError(
            f"slow_factor: {given['slow_factor']} has no effect while no device is slow; give "
            "--slow-probability too"
        )
    if given and given.keys() <= {"samples", "seed"}:
        raise PipeplanError(
            f"{name}: {value} has no effect without noise; give --jitter too, such as --jitter 0.05"
            for name, value in given.items()
        )


def noise_report(plan: Plan, noise: Noise | None) -> dict[str, Any]:
    """Return the noise and the iteration times under it (in seconds) as plain data."""
    from planner.simulation.noise import times_under_noise
    from planner.simulation.simulator import simulate_plan

    if noise is None:
        return {}
    times = times_under_noise(simulate_plan(plan), noise)
    return {"under_noise": {**asdict(noise), **asdict(times)}}


def show_noise(plan: Plan, noise: Noise | None) -> None:
    """Print the plan's iteration times under the noise, if any."""
    from planner.report.summary import noise_table
    from planner.simulation.noise import times_under_noise
    from planner.simulation.simulator import simulate_plan

    if noise is not None:
        show(noise_table(noise, times_under_noise(simulate_plan(plan), noise)))


OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="write the plan with new predictions to this file"),
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="write a Chrome trace for Perfetto")
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
    runtime: RunByOption = None,
    epoch_samples: EpochOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan: times and memory, also under noise or other synchronisation strategies."""
    with user_errors(as_json):
        from planner.prediction import load_plan

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
            {
                "trace": trace_path,
                "against": against,
                "runtime": runtime,
                "epoch_samples": epoch_samples,
                **noises,
            },
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
            loaded = load_plan(path, runtime)
            job = with_epoch(loaded.job, epoch_samples)
            loaded = loaded.model_copy(update={"job": job})
            _show_replay(path, loaded, output, trace_path, against, noise, as_json=as_json)


def _show_replay(
    path: Path,
    loaded: Plan,
    output: Path | None,
    trace_path: Path | None,
    against: Path | None,
    noise: Noise | None,
    *,
    as_json: bool,
) -> None:
    """Simulate a plan, write the requested files and print the results."""
    from planner.prediction import refresh

    with named(path):
        plan = refresh(loaded)
    comparison = comparison_of(plan, against)
    _write(plan, output, trace_path)
    if as_json:
        print_json(_data(plan, noise, comparison))
        return
    show_plan(plan)
    _show_overflow(plan)
    show_runtime(plan)
    show_against(comparison)
    show_noise(plan, noise)
    if plan.provenance != loaded.provenance:
        say(f"the bound covers {plan.provenance.bound_covers}")
    for written in (output, trace_path):
        if written is not None:
            say(f"wrote {written}")


def _show_overflow(plan: Plan) -> None:
    """Say which devices the plan needs more memory of than they have."""
    from planner.report.summary import overflow_line

    cluster = plan.on_groups.cluster
    rows = [
        (device, row.peak_memory_bytes, cluster.device_type(device).capacity_bytes)
        for device, row in plan.predicted.devices.items()
    ]
    over = [row for row in rows if row[1] > row[2]]
    if over:
        say(overflow_line(over))


def _write(plan: Plan, output: Path | None, trace_path: Path | None) -> None:
    from planner.report.chrome_trace import save_chrome_trace
    from planner.simulation.simulator import simulate_plan
    from planner.verification import save_valid

    if output is not None:
        save_valid(plan, output)
    if trace_path is not None:
        save_chrome_trace(simulate_plan(plan), trace_path)


def _data(plan: Plan, noise: Noise | None, comparison: Comparison | None) -> dict[str, Any]:
    """Return the JSON output."""
    from planner.report.summary import throughput_data

    return {
        **plan.predicted.model_dump(mode="json"),
        "throughput": throughput_data(plan),
        **noise_report(plan, noise),
        **against_report(comparison),
    }
