"""What limits a schedule, in lines for people and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from planner.analysis.explain.bubble import CAUSES, Bubble, IdleTime, waited_s
from planner.analysis.explain.explanation import Explanation
from planner.analysis.explain.memory import MemoryLimit
from planner.analysis.explain.path_shares import PathShare
from planner.analysis.explain.resources import Resource
from planner.analysis.explain.stage_limits import StageLimit
from planner.plan.operations import compress_devices, stages_label
from planner.plan.plan import Plan
from planner.report.summary import (
    length_lines,
    overflow_line,
    time_provenance_data,
    time_provenance_lines,
)
from planner.report.tables import Table, View
from planner.simulation.time_provenance import path_time_provenance
from planner.simulation.timeline import (
    CopyEvent,
    Event,
    OperationEvent,
    OptimizerEvent,
    SynchronisationEvent,
)
from planner.units import format_seconds, plural

MOST_NAMED = 3
"""Most devices or links named for each cause; the rest is summed."""
MOST_DEVICES = 16
"""Most names of a list, and devices of a table; of more, the first or the idlest are shown."""
LEAST_SHARE = 0.0005
"""A smaller one would be shown as 0.0%."""
NEAR = 0.01
"""A schedule within this share of a lower bound is as good as bound by it."""

WAITS = {
    "waits for\ncomputation": "fill_and_drain_s",
    "\ntransfers": "transfers_s",
    "all-reduce,\noptimizer": "synchronisation_s",
}
"""Headings of what a device waits for, with the causes that it counts as."""
CAUSE_NAMES = {
    "imbalance_s": "imbalance",
    "fill_and_drain_s": "fill and drain",
    "transfers_s": "transfers",
    "synchronisation_s": "all-reduces and optimizer",
}


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return lines on why the iteration is not faster, the strongest limit first.

    Memory leads where it was found to bind, then a device or link whose lower bound is nearly
    reached, then the critical path; what does not bind follows.
    """
    limit, memory = _limit_line(explanation), _memory_line(explanation.memory)
    reached, binds = _above(explanation) <= NEAR, explanation.memory.binds
    return [
        f"iteration {format_seconds(explanation.iteration_time_s)}",
        *([memory] if binds else []),
        *([limit] if reached else []),
        _path_line(explanation),
        *([] if reached else [limit]),
        *([] if binds else [memory]),
        _bubble_line(explanation.bubble),
    ]


def explanation_view(plan: Plan, explanation: Explanation) -> View:
    """Return why the iteration is not faster, in lines and tables."""
    shares = path_time_provenance(explanation.pipeline, explanation.critical_path)
    return [
        *explanation_lines(explanation),
        *time_provenance_lines(shares),
        *length_lines(plan),
        _parts_table(explanation),
        _idle_table(explanation.bubble),
        _stages_table(explanation.stages),
    ]


def explanation_data(explanation: Explanation) -> dict[str, Any]:
    """Return the whole explanation as plain JSON values, with the unit in every name."""
    memory = explanation.memory
    return {
        "iteration_time_s": explanation.iteration_time_s,
        "time_provenance": time_provenance_data(explanation.pipeline, explanation.critical_path),
        "shares": [
            {**share.spent._asdict(), "seconds": share.seconds, "share": share.share}
            for share in explanation.shares
        ],
        "parts": [asdict(part) for part in explanation.parts],
        "binding_resource": _resource_data(explanation.binding_resource),
        "resources": [_resource_data(resource) for resource in explanation.resources],
        "memory": {
            "binds": memory.binds,
            "full_devices": list(memory.full),
            "recomputes": memory.recomputes,
            "offloads": memory.offloads,
            "within_s": memory.within_s,
            "unlimited_s": memory.unlimited_s,
            "devices": [
                {**asdict(room), "more_microbatches": room.more_microbatches}
                for room in memory.rooms
            ],
        },
        "bubble": _bubble_data(explanation.bubble),
        "stages": [asdict(limit) for limit in explanation.stages],
        "critical_path": [
            {
                "event": _event_name(step.event),
                "start_s": step.event.start_s,
                "end_s": step.event.end_s,
                "waited_for": step.waited_for,
            }
            for step in explanation.critical_path
        ],
    }


def _resource_data(resource: Resource) -> dict[str, Any]:
    return {**asdict(resource), "bound_s": resource.bound_s}


def _bubble_data(bubble: Bubble) -> dict[str, Any]:
    """Return causes in total and per device, and what each device waited for."""
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


def _event_name(event: Event) -> str:
    match event:
        case OperationEvent(device, operation):
            return f"{operation} on {device}"
        case SynchronisationEvent(synchronisation):
            return f"{event.kind} on {compress_devices(synchronisation.devices)}"
        case OptimizerEvent(device):
            return f"optimizer step on {device}"
        case CopyEvent(device, operation):
            way = "to the host" if event.is_out else "back from the host"
            return f"stash of {operation} on {device} {way}"
    return f"{event.operation} from {event.source} to {event.target}"


# --- the lines ------------------------------------------------------------------------------------


def _path_line(explanation: Explanation) -> str:
    groups: dict[str, list[PathShare]] = {}
    for share in explanation.shares:
        groups.setdefault(share.spent.cause, []).append(share)
    sums = {cause: sum(share.share for share in shares) for cause, shares in groups.items()}
    parts = [
        f"{cause} {sums[cause]:.1%} ({_named(groups[cause])})"
        for cause in sorted(groups, key=lambda cause: -sums[cause])
        if sums[cause] >= LEAST_SHARE
    ]
    return f"critical path: {', '.join(parts) or 'the iteration takes no time (all costs are 0)'}"


def _named(shares: list[PathShare]) -> str:
    """Return the largest causes by name and the rest as one sum."""
    if len(shares) == 1:
        return _place(shares[0])
    named = [share for share in shares[:MOST_NAMED] if share.share >= LEAST_SHARE]
    texts = [f"{_place(share)} {share.share:.1%}" for share in named]
    rest = shares[len(named) :]
    rest_share = sum(share.share for share in rest)
    if rest_share >= LEAST_SHARE:
        texts.append(f"{plural(len(rest), 'other')} {rest_share:.1%}")
    return "; ".join(texts)


def _place(share: PathShare) -> str:
    names, stages = _devices(share.spent.on), share.spent.stages
    return f"{stages_label(stages)} on {names}" if stages else names


def _devices(names: Sequence[str]) -> str:
    """Return device names in compressed form; of many only the first."""
    if len(names) <= MOST_DEVICES:
        return compress_devices(names)
    return f"{compress_devices(names[:MOST_DEVICES])}, … ({plural(len(names), 'device')})"


def _with_stages(device: str, stages: tuple[int, ...]) -> str:
    return f"{device} ({stages_label(stages)})"


def _above(explanation: Explanation) -> float:
    """Return how far the iteration is above the highest lower bound, as a fraction of it."""
    if explanation.iteration_time_s == 0:
        return 0.0
    return max(0.0, 1 - explanation.binding_resource.bound_s / explanation.iteration_time_s)


def _limit_line(explanation: Explanation) -> str:
    resource, above = explanation.binding_resource, _above(explanation)
    if resource.kind == "device":
        does = f"{_with_stages(resource.name, resource.stages)} computes for"
    else:
        does = f"link {resource.name} carries data for"
    is_below = above >= LEAST_SHARE
    gap = f"{above:.1%} below this iteration" if is_below else "which this iteration reaches"
    return (
        f"highest lower bound: {does} "
        f"{format_seconds(resource.load_s)}, starts at {format_seconds(resource.head_s)} at the "
        f"earliest, and {format_seconds(resource.tail_s)} follow: every order of the same work "
        f"takes at least "
        f"{format_seconds(resource.bound_s)}, {gap}"
    )


def _memory_line(memory: MemoryLimit) -> str:
    over = [room for room in memory.rooms if room.room_bytes < 0]
    if over:
        return overflow_line([(room.device, room.peak_bytes, room.capacity_bytes) for room in over])
    if memory.unlimited_s is None:
        return f"memory is not a limit for these stages: at the peak {_least_room(memory)}"
    trial = f"{format_seconds(memory.unlimited_s)} against {format_seconds(memory.within_s)}"
    if memory.binds:
        return (
            f"memory is a limit: {_why_trial(memory)}; with unlimited memory a quick schedule of "
            f"the "
            f"same stages takes {trial}, {memory.gain:.1%} less"
        )
    return (
        f"memory is not a limit for these stages: {_why_trial(memory)}, but unlimited memory would "
        f"not make a quick schedule faster ({trial})"
    )


def _why_trial(memory: MemoryLimit) -> str:
    texts = []
    if memory.full:
        texts.append(f"at the peak no further microbatch fits on {_devices(memory.full)}")
    if memory.recomputes:
        texts.append("layers are recomputed to save memory")
    if memory.offloads:
        texts.append("stashes are offloaded to the host to save memory")
    return ", ".join(texts)


def _least_room(memory: MemoryLimit) -> str:
    counts = {room.device: room.more_microbatches for room in memory.rooms}
    known = [count for count in counts.values() if count is not None]
    if not known:
        return "any number of further microbatches could be in flight"
    least = min(known)
    names = _devices([device for device, count in counts.items() if count == least])
    return f"at least {plural(least, 'further microbatch', 'es')} could be in flight (on {names})"


def _bubble_line(bubble: Bubble) -> str:
    """Return the bubble and its causes in one line, the largest cause first."""
    if bubble.iteration_time_s == 0:
        return "the iteration takes no time (all costs are 0)"
    whole_s = len(bubble.devices) * bubble.iteration_time_s
    shares = {name: bubble.cause_s(cause) / whole_s for cause, name in CAUSE_NAMES.items()}
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


# --- the tables -----------------------------------------------------------------------------------


def _parts_table(explanation: Explanation) -> Table:
    """Return a table of what the iteration's time consists of; its rows sum to the whole."""
    parts = [(part.name, part.seconds, part.share) for part in explanation.parts]
    rows = [*parts, ("iteration", explanation.iteration_time_s, 1.0)]
    cells = ((name, format_seconds(seconds), f"{share:.1%}") for name, seconds, share in rows)
    title = "The iteration, along its critical path"
    return Table.of(title, ("part",), ("time", "share"), cells)


def _idle_table(bubble: Bubble) -> Table:
    """Return a table with one row per device: how long it idles and what it waits for."""
    ranked = sorted(bubble.devices, key=lambda row: -row.idle_s)
    more = len(ranked) - MOST_DEVICES
    rest = f"; {more} less idle devices not shown" if more > 0 else ""
    return Table.of(
        f"Idle time, as a fraction of the iteration{rest}",
        ("device",),
        ("idle", "imbalance", *WAITS),
        ((row.device, *_idle_shares(row, bubble)) for row in ranked[:MOST_DEVICES]),
    )


def _idle_shares(row: IdleTime, bubble: Bubble) -> Iterable[str]:
    waited = [waited_s(row.waited_for, cause) for cause in WAITS.values()]
    whole_s = bubble.iteration_time_s
    for seconds in (row.idle_s, row.imbalance_s, *waited):
        yield f"{max(0.0, seconds / whole_s) if whole_s > 0 else 0.0:.1%}"


def _stages_table(stages: Iterable[StageLimit]) -> Table:
    """Return a table with one row per stage: its limit and the effect of its speed."""
    return Table.of(
        "Stages: what limits them, and the effect of a faster or slower stage (same orders)",
        ("stage", "devices", "limited by"),
        ("if 10%\nslower", "if 10%\nfaster"),
        (
            (
                *(str(row.stage), compress_devices(row.devices), row.limited_by),
                *map(signed_share, (row.slower_10_percent, row.faster_10_percent)),
            )
            for row in stages
        ),
    )


def signed_share(share: float) -> str:
    """Format a change as a share of a time, such as ``-1.8%``; ``0`` where it is too small."""
    return f"{share:+.1%}" if abs(share) >= LEAST_SHARE else "0"
