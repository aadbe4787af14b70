"""The bubble by cause and the limits of stages, as a line, a table and plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner.analysis.explain.bubble import CAUSES, Bubble, IdleTime
from planner.analysis.explain.stage_limits import StageLimit
from planner.plan.operations import compress_devices
from planner.report.tables import Table

LEAST_SHARE = 0.0005
"""A smaller one would be shown as 0.0%."""
MOST_DEVICES = 16
"""Most devices in the table; of more, the idlest are shown."""
WAITS = (
    ("waits for\ncomputation", ("computation",)),
    ("\ntransfers", ("transfers",)),
    ("all-reduce,\noptimizer", ("all-reduce", "all-gather", "optimizer")),
)
"""Headings of what a device waits for, with the causes they hold."""
NAMES = {
    "imbalance_s": "imbalance",
    "fill_and_drain_s": "fill and drain",
    "transfers_s": "transfers",
    "synchronisation_s": "all-reduces and optimizer",
}
"""Names of the causes in tables."""


def bubble_line(bubble: Bubble) -> str:
    """Return the bubble and its causes in one line, the largest cause first."""
    if bubble.iteration_time_s == 0:
        return "the iteration takes no time (all costs are 0)"
    whole_s = len(bubble.devices) * bubble.iteration_time_s
    shares = {NAMES[name]: bubble.cause_s(name) / whole_s for name in CAUSES}
    parts = [
        f"{name} {shares[name]:.1%}"
        for name in sorted(shares, key=lambda name: -shares[name])
        if shares[name] >= LEAST_SHARE
    ]
    text = f"bubble {max(0.0, bubble.share):.1%}"
    if not parts:
        return text
    return (
        f"{text}: {', '.join(parts)}; imbalance: work that devices have less than the busiest, "
        f"{bubble.busiest}; the other causes are what {bubble.busiest} waits for"
    )


def bubble_data(bubble: Bubble) -> dict[str, Any]:
    """Return causes in total and per device, and what each device waited for, as JSON values."""
    return {
        "idle_s": bubble.idle_s,
        "share": bubble.share,
        "busiest_device": bubble.busiest,
        "causes": {name: bubble.cause_s(name) for name in CAUSES},
        "devices": [
            {
                "device": row.device,
                "idle_s": row.idle_s,
                **{name: getattr(row, name) for name in CAUSES},
                "waited_for": [
                    {**waited.spent._asdict(), "seconds": waited.seconds}
                    for waited in row.waited_for
                ],
            }
            for row in bubble.devices
        ],
    }


def idle_table(bubble: Bubble) -> Table:
    """Return a table with one row per device: how long it idles and what it waits for."""
    ranked = sorted(bubble.devices, key=lambda row: -row.idle_s)
    more = len(ranked) - MOST_DEVICES
    rest = f"; {more} less idle devices not shown" if more > 0 else ""
    table = Table(
        f"Idle time, as a fraction of the iteration{rest}",
        ("device",),
        ("idle", "imbalance", *(heading for heading, _ in WAITS)),
    )
    for row in ranked[:MOST_DEVICES]:
        seconds = [row.idle_s, row.imbalance_s, *(_waited_s(row, causes) for _, causes in WAITS)]
        whole_s = bubble.iteration_time_s
        shares = (part_s / whole_s if whole_s > 0 else 0.0 for part_s in seconds)
        table.add_row(row.device, *(f"{max(0.0, share):.1%}" for share in shares))
    return table


def _waited_s(row: IdleTime, causes: tuple[str, ...]) -> float:
    return sum(waited.seconds for waited in row.waited_for if waited.spent.cause in causes)


def stages_table(stages: Iterable[StageLimit]) -> Table:
    """Return a table with one row per stage: its limit and the effect of its speed."""
    table = Table(
        "Stages: what limits them, and the effect of a faster or slower stage (same orders)",
        ("stage", "devices", "limited by"),
        ("if 10%\nslower", "if 10%\nfaster"),
    )
    for row in stages:
        table.add_row(
            str(row.stage),
            compress_devices(row.devices),
            row.limited_by,
            _change(row.slower_10_percent),
            _change(row.faster_10_percent),
        )
    return table


def _change(share: float) -> str:
    return f"{share:+.1%}" if abs(share) >= LEAST_SHARE else "0"
