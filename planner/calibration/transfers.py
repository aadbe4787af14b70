"""Seconds of messages between devices, without what they waited for others on the same links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from planner.artifacts.cluster import Cluster
from planner.artifacts.measured import MeasuredTimeline, MeasuredTransfer

Ends = tuple[str, str]
"""Two devices, in the order of the cluster file."""
TransferSamples = dict[int, list[float]]
"""Seconds of messages by their bytes."""
_Resource = tuple[int, int]


def transfer_samples(cluster: Cluster, measured: MeasuredTimeline) -> dict[Ends, TransferSamples]:
    """Seconds of messages between each two devices, both directions together, by bytes.

    Only the steps that count; of pairs with messages that had their links to themselves only
    these. Else a message is taken to start when the one before it has left their links.
    """
    alone: dict[Ends, TransferSamples] = {}
    behind: dict[Ends, TransferSamples] = {}
    for event, seconds, is_alone in _served(cluster, measured):
        if event.bytes and seconds > 0:
            place = alone if is_alone else behind
            rows = place.setdefault(_ends(cluster, event), defaultdict(list))
            rows[event.bytes].append(seconds)
    return {ends: alone.get(ends) or behind[ends] for ends in dict.fromkeys([*alone, *behind])}


def _ends(cluster: Cluster, event: MeasuredTransfer) -> Ends:
    first, second = sorted((event.source, event.target), key=cluster.numbers.__getitem__)
    return first, second


def _served(
    cluster: Cluster, measured: MeasuredTimeline
) -> Iterator[tuple[MeasuredTransfer, float, bool]]:
    """Each transfer with its time on its links, and whether it had them to itself."""
    for step in measured.counted_steps:
        events = [event for event in measured.transfers if event.step == step]
        routes = [_resources(cluster, event) for event in events]
        yield from _served_in_step(events, routes)


def _resources(cluster: Cluster, event: MeasuredTransfer) -> tuple[_Resource, ...]:
    route = cluster.route(event.source, event.target)
    return () if route is None else route.links


def _served_in_step(
    events: Sequence[MeasuredTransfer], routes: Sequence[tuple[_Resource, ...]]
) -> Iterator[tuple[MeasuredTransfer, float, bool]]:
    crowded = _crowded(events, routes)
    free_at: dict[_Resource, float] = defaultdict(float)
    for index, (event, route) in enumerate(zip(events, routes, strict=True)):
        start_s = max([event.start_s, *(free_at[link] for link in route)])
        # One that ended before those ahead of it did not wait for them.
        seconds = event.end_s - (start_s if start_s < event.end_s else event.start_s)
        for link in route:
            free_at[link] = max(free_at[link], event.end_s)
        yield event, seconds, index not in crowded


def _crowded(
    events: Sequence[MeasuredTransfer], routes: Sequence[tuple[_Resource, ...]]
) -> set[int]:
    """The transfers that overlap another on one of their links."""
    found: set[int] = set()
    last: dict[_Resource, int] = {}
    for index, (event, route) in enumerate(zip(events, routes, strict=True)):
        for link in route:
            other = last.get(link)
            if other is not None and events[other].end_s > event.start_s:
                found |= {index, other}
            if other is None or events[other].end_s <= event.end_s:
                last[link] = index
    return found
