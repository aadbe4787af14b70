"""The executor in four minutes: six trainings, two rows beside torch, four schedules, a testbed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.catalogue import (
    EXECUTOR_MEDIAN_ERROR_BAR,
    EXECUTOR_OVERHEAD_BAR,
    EXECUTOR_PEERS_BAR,
    EXECUTOR_SPEED_UP_BAR,
    EXECUTOR_SPEED_UP_ERROR_BAR,
    EXECUTOR_WORST_ERROR_BAR,
)
from benchmarks.executor import compare_peers as executor_peers
from benchmarks.executor import on_testbed as executor_testbed
from benchmarks.executor import overhead as executor_overhead
from benchmarks.executor import parity as executor_parity
from benchmarks.executor.peers.cases import Case, Schedule
from benchmarks.executor.plans import PRECISIONS
from benchmarks.executor.single_process import TOLERANCE
from benchmarks.reporting.claims import Claim, Entry, LeftOut, details, met
from benchmarks.testbed.network import why_not

TRAININGS = 6
PEERS: tuple[tuple[str, Schedule], ...] = (("gpt", "1f1b"), ("llama", "zb-v"))
SCHEDULES = ("1f1b", "interleaved 1f1b", "zb-v")
OVERHEAD_STEPS, TESTBED_STEPS, PLAN_LIMIT_S = 8, 12, 8.0
CLUSTER, MODEL = "shared_uplink", "gpt"
SINGLE = "one process, plain torch"
TORCH = "torch.distributed.pipelining, the same order of the same work"
SIMULATOR = "our simulator; our own bar"


def entries(seed: int) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        seed: of the random trainings.
    """
    yield from _parity(seed)
    yield from _peers()
    yield from _overhead()
    yield from _testbed()


def _parity(seed: int) -> Iterator[Entry]:
    outcomes = executor_parity.parity(TRAININGS, seed)
    for precision in PRECISIONS:
        mine = [outcome for outcome in outcomes if outcome.precision == precision]
        fine = sum(not outcome.problems for outcome in mine)
        claim = f"random trainings that agree with one process to {TOLERANCE[precision]:g}"
        yield met(f"{claim}, {precision}", SINGLE, fine, len(mine), regime="two to six ranks")
    columns = executor_parity.COLUMNS
    yield details("Against a single process", columns, executor_parity.rows_of(outcomes))
    every = executor_parity.TRAININGS
    yield LeftOut(text=f"{every - TRAININGS} of {every} random trainings")


def _peers() -> Iterator[Entry]:
    rows = executor_peers.peers([Case.mid_size(model, order) for model, order in PEERS])
    for row in rows:
        regime = f"{row.model}, {row.schedule}, {row.ranks} ranks"
        first, third = row.step_time.quartiles
        yield Claim(
            claim=f"step time over torch's: {row.model}, {row.schedule}",
            source=TORCH,
            sense="at most",
            bar=EXECUTOR_PEERS_BAR,
            figure=row.step_time.median,
            regime=regime,
            note=f"median of the rounds of two launches, quartiles {first:.3f} to {third:.3f}",
        )
        yield Claim(
            claim=f"peak memory over torch's: {row.model}, {row.schedule}",
            source=TORCH,
            sense="at most",
            bar=EXECUTOR_PEERS_BAR,
            figure=row.memory_ratio,
            regime=regime,
            note="of the rank where it is largest",
        )
    columns = executor_peers.COLUMNS
    yield details("Beside torch's own pipeline runtime", columns, [row.cells for row in rows])
    every = len(executor_peers.mid_size_cases())
    yield LeftOut(text=f"{every - len(rows)} of {every} rows beside torch's runtime")


def _overhead() -> Iterator[Entry]:
    rows = list(executor_overhead.rows(OVERHEAD_STEPS, SCHEDULES))
    worst = max(rows, key=lambda row: row.overhead)
    yield Claim(
        claim="iteration over the simulator's, less one: worst",
        source=SIMULATOR,
        sense="below",
        bar=EXECUTOR_OVERHEAD_BAR,
        figure=worst.overhead,
        unit="%",
        regime=f"four ranks, emulated compute, loopback, {len(rows)} schedules",
        note=f"{worst.schedule}, {worst.placement}",
    )
    yield details(
        "Over the simulator's iteration", executor_overhead.COLUMNS, [row.cells for row in rows]
    )
    yield LeftOut(text="the other published schedules' overhead")


def _testbed() -> Iterator[Entry]:
    reason = why_not()
    if reason is not None:
        yield from _skipped(reason)
        return
    rows = list(
        executor_testbed.rows([CLUSTER], [MODEL], steps=TESTBED_STEPS, time_limit_s=PLAN_LIMIT_S)
    )
    told = executor_testbed.speed_ups(rows)
    yield from _testbed_claims(rows, told)
    yield details(
        "Predicted against measured on the testbed",
        executor_testbed.PREDICTION_COLUMNS,
        [row.cells for row in rows],
    )
    yield details(
        "What our plans are worth there",
        executor_testbed.SPEED_UP_COLUMNS,
        [one.cells for one in told],
    )
    pairs = len(executor_testbed.known_clusters()) * len(executor_testbed.MODELS)
    yield LeftOut(text=f"{pairs - 1} of {pairs} pairs of a cluster and a model on the testbed")


MEDIAN = "predicted against measured iteration on the testbed: median error"
WORST = "predicted against measured iteration on the testbed: worst error"
OFF = "measured speed-up over classic planners, off the predicted one: most"
LEAST = "measured speed-up over classic planners: least"
RIVALS = "even splits, PipeDream, SPP, each with its best classic schedule"


def _skipped(reason: str) -> Iterator[Claim]:
    for claim, source in ((MEDIAN, SIMULATOR), (WORST, SIMULATOR), (OFF, RIVALS), (LEAST, RIVALS)):
        yield Claim(claim=claim, source=source, not_run=reason)


def _testbed_claims(
    rows: Sequence[executor_testbed.Row], told: Sequence[executor_testbed.SpeedUp]
) -> Iterator[Claim]:
    regime = f"{MODEL} on {CLUSTER}: {len(rows)} plans, emulated compute, shaped links"
    errors = [abs(row.error) for row in rows]
    off = max(abs(one.off) for one in told)
    least = min(told, key=lambda one: one.measured)
    for claim, source, sense, bar, figure in (
        (MEDIAN, SIMULATOR, "below", EXECUTOR_MEDIAN_ERROR_BAR, statistics.median(errors)),
        (WORST, SIMULATOR, "below", EXECUTOR_WORST_ERROR_BAR, max(errors)),
        (OFF, RIVALS, "at most", EXECUTOR_SPEED_UP_ERROR_BAR, off),
    ):
        yield Claim.model_validate(
            {
                **{"claim": claim, "source": source, "sense": sense, "bar": bar},
                **{"figure": figure, "unit": "%", "regime": regime},
            }
        )
    yield Claim(
        claim=LEAST,
        source=RIVALS,
        bar=EXECUTOR_SPEED_UP_BAR,
        figure=least.measured,
        regime=regime,
        note=least.row.planner + (" (the same plan)" if least.same else ""),
    )
