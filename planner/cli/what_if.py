"""The options that say which changes are valued and how, and the work behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from planner.errors import PipeplanError
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.explain import Explanation
    from planner.what_if import Change, WhatIf
    from planner.what_if.values import Progress

TIME_LIMIT_S = 60.0

WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if", help="solve anew under each change, instead of replays and quick schedules"
    ),
]
ChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="CHANGE",
        help="value this change instead of the usual ones, such as 'link n0-tor bandwidth x2', "
        "'device n1/gpu3 memory x1.2', 'type A10 speed +20%', 'recompute h.3', 'keep h.3', "
        "'microbatches x2', 'another n0/gpu0'; may be repeated",
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help=f"of --what-if, all changes together; {TIME_LIMIT_S:g} by default",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="of --what-if's solver")]
WorkersOption = Annotated[int, typer.Option("--workers", help="solver threads of --what-if")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="the same answer on every run and machine")
]


@dataclass(frozen=True)
class ValueRequest:
    """Which changes are valued and how, see :func:`planner.what_if.what_if`.

    Attributes:
        changes: the usual ones if there are none.
        solve_anew, time_limit_s, seed, workers, deterministic: of the search.
    """

    changes: tuple[Change, ...]
    solve_anew: bool
    time_limit_s: float
    seed: int
    workers: int
    deterministic: bool

    @property
    def is_asked_for(self) -> bool:
        """Whether an option asks for values, and not only for those that come by themselves."""
        return self.solve_anew or bool(self.changes)


def value_request(
    solve_anew: bool,
    changes: Sequence[str] | None,
    time_limit_s: float | None,
    seed: int,
    workers: int,
    deterministic: bool,
) -> ValueRequest:
    """What the options say; None where one was not given.

    Raises:
        PipeplanError: naming a setting out of range, or a change that cannot be read.
    """
    from planner.solver import check_settings
    from planner.what_if import parse_change

    if time_limit_s is not None and not solve_anew:
        raise PipeplanError("--time-limit: only --what-if searches; add it")
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    check_settings(limit_s, 0.0, seed, workers)
    parsed = tuple(parse_change(text) for text in changes or ())
    return ValueRequest(parsed, solve_anew, limit_s, seed, workers, deterministic)


def require_changes(plan: Plan, changes: Sequence[Change]) -> None:
    """What is wrong with changes is told before a search that takes its time.

    Raises:
        PipeplanError: naming every change that cannot be made.
    """
    from planner.what_if.altered import alter_each, unaltered

    alter_each(unaltered(plan), changes)


def values_of(
    plan: Plan, explanation: Explanation, request: ValueRequest, *, quiet: bool = False
) -> WhatIf:
    """Value what is asked for, else the usual changes.

    Args:
        plan: that fits memory.
        explanation: of its replay.
        request: what is asked for.
        quiet: no line on stderr for each step of a search.

    Raises:
        PipeplanError: if the plan overflows memory.
    """
    from planner.what_if import default_changes, what_if

    usual = default_changes(plan, explanation, devices=request.solve_anew)
    return what_if(
        plan,
        request.changes or usual,
        solve_anew=request.solve_anew,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        workers=request.workers,
        deterministic=request.deterministic,
        progress=None if quiet else _tell,
    )


def _tell(row: Progress) -> None:
    """A line for each step of a search."""
    time = "nothing fits" if row.iteration_time_s is None else format_seconds(row.iteration_time_s)
    typer.echo(
        f"{row.elapsed_s:7.1f}s  {row.step:>9}  {time:>12}  {row.change or 'no change'}", err=True
    )
