"""What is printed of a training whose pipelines run side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from executor.coordinator.supervised import Work
from executor.faults import Fault
from executor.metrics import StepMetrics
from executor.pipelines.seat import Seat
from planner.units import plural


def begin_line(work: Work, pipeline: int, share_size: int) -> str:
    """The strategy, the pipelines and the shares, before the first step.

    Args:
        work: that all share.
        pipeline: whose steps are printed.
        share_size: microbatches of a share.
    """
    return (
        f"{work.sync.strategy}: {plural(work.pipelines, 'pipeline')} of "
        f"{plural(work.places, 'rank')} side by side, {plural(work.shares, 'share')} of "
        f"{plural(share_size, 'microbatch', 'es')} in all; the lines of steps are of "
        f"pipeline {pipeline}'s own shares"
    )


def end_lines(
    report: dict[str, Any], seat: Seat, history: Sequence[StepMetrics], took_s: float
) -> Iterator[str]:
    """What all have trained, and how fast; nothing if this pipeline had no share.

    Args:
        report: the coordinator's.
        seat: of who prints it.
        history: of its pipeline.
        took_s: from the first share to the last.
    """
    if not history:
        return
    done, number = report["committed"], len(report["lives"])
    yield (
        f"trained {plural(done, 'share')} on {plural(number, 'pipeline')}, "
        f"{done / took_s:.3g} shares/s; {len(history)} of them on pipeline {seat.pipeline}, whose "
        f"own loss went {history[0].loss:.4f} -> {history[-1].loss:.4f}"
    )


def missed_lines(faults: Sequence[Fault]) -> Iterator[str]:
    """Faults on purpose that did not happen."""
    for fault in faults:
        why = {
            "return": "its pipeline was not started again",
            "at": f"its pipeline did not begin step {fault.step}",
            "in": f"its pipeline had no average of several members under way at step {fault.step}",
        }["return" if fault.kind == "return" else fault.moment]
        yield f"inject: {fault.word} never happened: {why}"
