"""The options of ``pipeplan simulate`` that replay a plan under noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.output import print_rich
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.robustness import Noise

JitterOption = Annotated[
    float | None,
    typer.Option(
        "--jitter",
        metavar="SHARE",
        help="replay with random durations, of this standard deviation: 0.05 for 5 %",
    ),
]
TransferJitterOption = Annotated[
    float | None,
    typer.Option(
        "--transfer-jitter",
        metavar="SHARE",
        help="the same of transfers and all-reduces; as --jitter unless given",
    ),
]
SlowProbabilityOption = Annotated[
    float | None,
    typer.Option(
        "--slow-probability",
        metavar="P",
        help="replay with devices that are slow for an iteration, each with this probability",
    ),
]
SlowFactorOption = Annotated[
    float | None,
    typer.Option(
        "--slow-factor",
        metavar="X",
        help="by which operations of a slow device take longer; 1.5 unless given",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", help="iterations under noise; 1000 unless given"),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="of the noise; 0 unless given")
]


def noise_of(**options: Any) -> Noise | None:
    """The noise that options ask for; None if they ask for none.

    Args:
        options: the fields of a noise, None where the user gave none.

    Raises:
        PipeplanError: if a value is out of range, or an option has no effect without another one.
    """
    from planner.robustness import Noise

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
    """The noise and the plan's iteration times under it in seconds, as plain data, if any."""
    from planner.robustness import times_under_noise
    from planner.simulator import simulate_plan

    if noise is None:
        return {}
    times = times_under_noise(simulate_plan(plan), noise)
    return {"under_noise": {**asdict(noise), **asdict(times)}}


def show_noise(plan: Plan, noise: Noise | None) -> None:
    """Print the plan's iteration times under the noise, if any."""
    from planner.report.summary import noise_table
    from planner.robustness import times_under_noise
    from planner.simulator import simulate_plan

    if noise is not None:
        print_rich(noise_table(noise, times_under_noise(simulate_plan(plan), noise)))
