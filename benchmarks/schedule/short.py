"""Schedules in five minutes: some that are proved at once, some that take their minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.reporting.claims import Claim, Details, Entry, LeftOut, details, met, without_data
from benchmarks.schedule import joint as schedule_joint
from benchmarks.schedule import rows as full
from benchmarks.schedule.rows import Case, Row, Settings

HEURISTIC = "Zero Bubble (ICLR 2024): the authors' search for ZB-1p and ZB-2p"
PUBLISHED = (
    "GPipe, 1F1B, eager 1F1B, SPP's PE, ZB-H1, ZB-H2, ZB-1p/2p: the best that fits; our own bar"
)
OURS = "our own bar: a bound on every schedule of these stages"
ANY_PLAN = "our own bar: a bound on every plan of the model"
MODELS, CLUSTERS = ("models.resnet:resnet50",), ("single_node", "irregular", "two_nodes")
COLUMNS = ("instance", "ours", "bound", "gap", "best classic / ours", "s")
_SLOWER = "public instances: not slower than the authors' heuristic"
_FASTER = "public instances: strictly faster on at least half"
_NEAR = "public instances: gap under 1 % on at least half"


def entries(data: Path | None, settings: Settings) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        data: folder of the public instances; None: what needs them is told as not run.
        settings: of each search.
    """
    yield from _zero_bubble(data, settings)
    yield from _uneven(settings)
    yield from _loose(settings)
    yield from _chunks(settings)
    yield from _many(settings)
    yield from _classics(settings)
    yield from _joint(settings)


def _zero_bubble(data: Path | None, settings: Settings) -> Iterator[Entry]:
    if data is None:
        yield from (without_data(said, HEURISTIC) for said in (_SLOWER, _FASTER, _NEAR))
        return
    path = data / "zero_bubble_instances.json"
    rows = list(full.zero_bubble_file(path, settings, every=2))
    told = [(row, row.reference or math.inf) for row in rows]
    # Within a microsecond the file's figures are rounded.
    slower = sum(row.value > reference + 1 for row, reference in told)
    faster = sum(row.value < reference - 1 for row, reference in told)
    proved = sum(reference <= row.lower_bound + 1 for row, reference in told)
    near = sum(row.gap < 0.01 for row in rows)
    half, unit = len(rows) / 2, f"of {len(rows)}"
    yield met(_SLOWER, HEURISTIC, len(rows) - slower, len(rows))
    note = f"in {proved} the heuristic's is proved optimal: nothing can be faster"
    yield Claim(
        claim=_FASTER,
        source=f"{HEURISTIC}; our own bar",
        bar=half,
        figure=faster,
        unit=unit,
        note=note,
    )
    yield Claim(claim=_NEAR, source=OURS, bar=half, figure=near, unit=unit)
    yield _table("Zero-bubble instances", rows)
    yield LeftOut(text="every second zero-bubble instance")


def _uneven(settings: Settings) -> Iterator[Entry]:
    every = full.one_stage_a_device()
    rows = _solved([case for case in every[6:] if case.cap == "1f1b"], settings)
    worst = max(rows, key=lambda row: row.gap)
    yield Claim(
        claim="one stage a device, 16 x 64, uneven: worst gap",
        source=OURS,
        sense="below",
        bar=full.UNEVEN_WORST,
        figure=worst.gap,
        unit="%",
        regime=f"{len(rows)} instances",
        note=worst.instance,
    )
    yield _table("One stage a device", rows)
    left = f"{len(every) - len(rows)} of {len(every)} with one stage a device, and so their median"
    yield LeftOut(text=left)


def _loose(settings: Settings) -> Iterator[Entry]:
    every = full.loose_caps()
    rows = _solved(every[1:], settings)
    claim = "one stage a device, memory for all microbatches: proved optimal"
    yield _within(claim, rows, lambda row: full.PROVED)
    yield LeftOut(text="1 of 4 with memory for all microbatches")


def _chunks(settings: Settings) -> Iterator[Entry]:
    every = full.two_stages_a_device()
    rows = _solved(every[:1], settings)
    claim = "two stages a device, 8 devices: gap within 5 % (16 microbatches) or 7 % (32)"
    yield _within(claim, rows, lambda row: full.chunks_gap(row.microbatches))
    yield _table("Two stages a device", rows)
    left = f"{len(every) - len(rows)} of {len(every)} with two stages a device"
    yield LeftOut(text=left + ", those in a V and with split backwards among them")


def _many(settings: Settings) -> Iterator[Entry]:
    every = full.many_microbatches()
    rows = _solved(every[8:12], settings)
    claim = f"many microbatches: gap within {full.MANY_GAP:.0%}"
    yield _within(claim, rows, lambda row: full.MANY_GAP)
    yield _table("Many microbatches", rows)
    yield LeftOut(text=f"{len(every) - len(rows)} of {len(every)} with many microbatches")


def _classics(settings: Settings) -> Iterator[Entry]:
    send_ms = full.SENDS_MS[-1]
    rows = _solved(full.against_classics(send_ms)[:6], settings)
    regime = f"8 x 32, uneven, transfers of {send_ms:g} ms, equal memory; {len(rows)} instances"
    yield Claim(
        claim="time of the best published schedule over ours, geometric mean",
        source=PUBLISHED,
        bar=full.CLASSIC_MEAN,
        figure=full.geometric_mean_over_classic(rows),
        regime=regime,
    )
    slower = sum(row.value > row.best_classic * (1 + 1e-9) for row in rows)
    claim = "schedules that are not slower than the best published one"
    yield met(claim, PUBLISHED, len(rows) - slower, len(rows), regime=regime)
    yield _table("Against published schedules", rows)
    every = len(full.SENDS_MS) * len(full.against_classics(send_ms))
    left = f"{every - len(rows)} of {every} against published schedules"
    yield LeftOut(text=left + ", those with shorter transfers among them")


def _joint(settings: Settings) -> Iterator[Entry]:
    rows = list(schedule_joint.joint_rows(settings, models=MODELS, clusters=CLUSTERS))
    reached = sum(row.gap < row.bar for row in rows)
    claim = "whole plans of traced models: gap below 2 % (7 % on irregular)"
    yield met(claim, ANY_PLAN, reached, len(rows), regime="ResNet-50 on sample clusters")
    yield details("Whole plans", schedule_joint.COLUMNS[:-1], [row.cells for row in rows])
    every = len(schedule_joint.CLUSTERS) * len(list(schedule_joint.jobs()))
    left = f"{every - len(rows)} of {every} whole plans"
    yield LeftOut(text=left + ", those on 64 GPUs and of language models among them")


def _solved(cases: list[Case], settings: Settings) -> list[Row]:
    return list(full.solve_cases(cases, settings))


def _within(claim: str, rows: list[Row], bar: Callable[[Row], float]) -> Claim:
    reached = sum(row.gap <= bar(row) for row in rows)
    worst = max(rows, key=lambda row: row.gap)
    note = f"worst gap {worst.gap:.2%}: {worst.instance}"
    return met(claim, OURS, reached, len(rows), note=note)


def _table(title: str, rows: list[Row]) -> Details:
    return details(f"{title}, microseconds", COLUMNS, (_cells(row) for row in rows))


def _name(row: Row) -> str:
    """Return the instance's name, with the cap unless the name shows it."""
    return row.instance if row.cap in row.instance else f"{row.instance}, cap {row.cap}"


def _cells(row: Row) -> tuple[object, ...]:
    ratio = row.best_classic / row.value
    return (
        _name(row),
        *(f"{row.value:,.0f}", f"{row.lower_bound:,.0f}", f"{row.gap:.2%}"),
        *(f"{ratio:.3f}" if math.isfinite(ratio) else "none fits", row.seconds),
    )
