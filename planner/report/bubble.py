"""The bubble by cause and the limits of stages, as a line, a table and plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from planner.explain.bubble import CAUSES, Bubble, IdleTime
from planner.explain.stage_limits import StageLimit
from planner.report.names import compress_devices
from planner.report.tables import new_table, plain

if TYPE_CHECKING:
    from rich.table import Table

LEAST_SHARE = 0.0005
"""A smaller one would be shown as 0.0%."""
MOST_DEVICES = 16
"""Of more, the idlest are shown."""
WAITS = (
    ("waits for\ncomputation", ("computation",)),
    ("\ntransfers", ("transfers",)),
    ("all-reduce,\noptimizer", ("all-reduce", "optimizer")),
)
"""Headings of what a device waits for, with the causes they hold."""
MOST_SLACK = 10.0
"""A stage that could be more than so many times slower is not told by how much."""
NAMES = {
    "imbalance_s": "imbalance",
    "fill_and_drain_s": "fill and drain",
    "transfers_s": "transfers",
    "memory_s": "memory",
    "synchronisation_s": "all-reduces and optimizer",
}
"""Of the causes, as they are shown."""


def bubble_line(bubble: Bubble) -> str:
    """The idle share of the devices' time and what it is made of, the largest cause first."""
    if bubble.iteration_time_s == 0:
        return "bubble: no time passes"
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
        f"{text}: {', '.join(parts)}; imbalance is what devices have less to do than the busiest, "
        f"{bubble.busiest}, the rest is what that waits for"
    )


def bubble_data(bubble: Bubble) -> dict[str, Any]:
    """Causes in total and of every device, and what each device waited for, as JSON values."""
    return {
        "idle_s": bubble.idle_s,
        "share": bubble.share,
        "busiest_device": bubble.busiest,
        "causes": {name: bubble.cause_s(name) for name in CAUSES},
        "devices": [_device_data(row) for row in bubble.devices],
    }


def _device_data(row: IdleTime) -> dict[str, Any]:
    return {
        "device": row.device,
        "idle_s": row.idle_s,
        **{name: getattr(row, name) for name in CAUSES},
        "waited_for": [
            {**waited.spent._asdict(), "seconds": waited.seconds} for waited in row.waited_for
        ],
    }


def idle_table(bubble: Bubble) -> Table:
    """One line a device, the idlest first: how long it idles, and what it waited for meanwhile."""
    ranked = sorted(bubble.devices, key=lambda row: -row.idle_s)
    more = len(ranked) - MOST_DEVICES
    rest = f"; {more} less idle ones left out" if more > 0 else ""
    table = new_table(
        f"Idle time, as a share of the iteration{rest}",
        ("device",),
        ("idle", "less to do", *(heading for heading, _ in WAITS)),
    )
    for row in ranked[:MOST_DEVICES]:
        seconds = [row.idle_s, row.imbalance_s, *(_waited_s(row, causes) for _, causes in WAITS)]
        whole_s = bubble.iteration_time_s
        shares = (part_s / whole_s if whole_s > 0 else 0.0 for part_s in seconds)
        table.add_row(plain(row.device), *(f"{max(0.0, share):.1%}" for share in shares))
    return table


def _waited_s(row: IdleTime, causes: tuple[str, ...]) -> float:
    return sum(waited.seconds for waited in row.waited_for if waited.spent.cause in causes)


def stages_table(stages: Iterable[StageLimit]) -> Table:
    """One line a stage: what limits it, how much slower it may be, and what its pace is worth."""
    table = new_table(
        "Stages: what limits them, and what their pace is worth (orders stay)",
        ("stage", "devices", "limited by"),
        ("slack", "slack\nfor +1%", "if 10%\nslower", "if 10%\nfaster"),
    )
    for row in stages:
        table.add_row(
            str(row.stage),
            plain(compress_devices(row.devices)),
            row.limited_by,
            _slack(row.slack),
            _slack(row.slack_for_1_percent),
            _change(row.slower_10_percent),
            _change(row.faster_10_percent),
        )
    return table


def _slack(share: float | None) -> str:
    if share is None:
        return "-"
    return f"> {MOST_SLACK:.0%}" if share > MOST_SLACK else f"{share:.1%}"


def _change(share: float) -> str:
    return f"{share:+.1%}" if abs(share) >= LEAST_SHARE else "0"
