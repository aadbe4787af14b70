"""Calibration of tensor-parallel groups: what was measured of groups, for the devices in them.

A run of groups measures operations and messages of groups as if these were devices. A message
between two groups goes along all links that join them, so that each of these is off by the factor
of all. Collectives inside a group are predicted from its links as well. Where no message uses these
they are off as the collectives are; where messages do, these tell more, since collectives come in
few sizes. Whatever else an operation takes is computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import TypeVar

from planner.analysis.deviation import Comparison
from planner.cluster.cluster import Cluster
from planner.cluster.collective_algorithms import all_reduce_algorithms
from planner.cluster.tensor_groups import TensorGroup, link_bundles
from planner.costs.group_collectives import inside_times
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place_plan
from planner.interop.calibrate.fits import AGREEMENT, Ends, route_of
from planner.interop.calibrate.links import NOTICEABLE_FACTOR, CalibratedLink, with_links
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, Layer
from planner.model.split_record import LayerSplit
from planner.plan.plan import Plan
from planner.units import format_seconds

Row = TypeVar("Row", Layer, LayerSplit)
INSIDE = "collectives"
"""The method of links that messages do not use and collectives inside a group do."""


def on_single_devices(
    plan: Plan,
    pipeline: PlacedPipeline,
    pairs: Collection[Ends],
    changes: Sequence[CalibratedLink],
    measured: Comparison,
) -> tuple[Cluster, tuple[CalibratedLink, ...], tuple[str, ...]]:
    """Return a plan's cluster with links from those between groups and collectives inside.

    With it come the links whose figures changed, and what people should know of them.

    Args:
        plan: of groups.
        pipeline: it on a cluster of its groups, before the calibration.
        pairs: groups between which messages were measured.
        changes: of links of that cluster.
        measured: the plan beside its measurement.
    """
    parallel = plan.tensor_parallel
    assert parallel is not None  # The plan has groups.
    bundles = link_bundles(plan.cluster, parallel.groups)
    outside = tuple(
        _single(plan.cluster, index, change)
        for change in changes
        for index in bundles[change.index]
    )
    used = {
        index
        for ends in pairs
        for bundle in route_of(pipeline.problem.cluster, ends).crossed
        for index in bundles[bundle]
    }
    found = with_links(plan.cluster, outside)
    ratios = {
        name: _ratio(rows) for name, rows in _collectives(plan, found, measured).items() if rows
    }
    inside = tuple(_inside(found, parallel.groups, ratios, used))
    found = with_links(found, inside)
    notes = tuple(_notes(_collectives(plan, found, measured)))
    return found, (*outside, *inside), notes


def _single(cluster: Cluster, index: int, change: CalibratedLink) -> CalibratedLink:
    """Return the change of one of the links that a group's link stands for."""
    before = cluster.links[index]
    wider = change.after.bandwidth_gb_per_s / change.before.bandwidth_gb_per_s
    latency_us = change.after.latency_us
    if change.before.latency_us:
        latency_us = before.latency_us * (change.after.latency_us / change.before.latency_us)
    figures = {
        "bandwidth_gb_per_s": before.bandwidth_gb_per_s * wider,
        "latency_us": latency_us,
        "source": change.after.source,
    }
    after = before.model_copy(update=figures)
    return CalibratedLink(index, before, after, change.method)


# --- collectives ----------------------------------------------------------------------------------


def _collectives(
    plan: Plan, cluster: Cluster, measured: Comparison
) -> dict[str, list[tuple[float, float]]]:
    """Return the predicted and the measured seconds of collectives of each group's operations."""
    placed = place_plan(plan.model_copy(update={"cluster": cluster}))
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (stage, device, kind), row in measured.collectives.items():
        expected_s = inside_times(placed, stage, device).seconds(kind)
        if row.measured_s is not None and expected_s:
            found[device].append((expected_s, row.measured_s))
    return found


def _ratio(rows: Sequence[tuple[float, float]]) -> float:
    """Return measured over predicted seconds."""
    return sum(found_s for _, found_s in rows) / sum(expected_s for expected_s, _ in rows)


def _inside(
    cluster: Cluster,
    groups: Sequence[TensorGroup],
    ratios: Mapping[str, float],
    used: Collection[int],
) -> Iterator[CalibratedLink]:
    """Yield links that no message used, as slow as the collectives of the groups that use them.

    Bandwidth and latency change by one factor: collectives of a group have few sizes.
    """
    by_link: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        ratio = ratios.get(group.name)
        if ratio:
            for index in _links_inside(cluster, group) - set(used):
                by_link[index].append(ratio)
    for index, found in sorted(by_link.items()):
        link, ratio = cluster.links[index], median(found)
        if abs(ratio - 1) > AGREEMENT:
            figures = {
                "bandwidth_gb_per_s": link.bandwidth_gb_per_s / ratio,
                "latency_us": link.latency_us * ratio,
                "source": "measured",
            }
            after = link.model_copy(update=figures)
            yield CalibratedLink(index, link, after, INSIDE)


def _links_inside(cluster: Cluster, group: TensorGroup) -> set[int]:
    edges = {edge for row in all_reduce_algorithms(group.devices, 1) for edge in row.edges}
    return {index for edge in edges for index in route_of(cluster, edge).crossed}


def _notes(collectives: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yield a note on the group whose collectives are predicted worst after the calibration."""
    ratios = {name: _ratio(rows) for name, rows in collectives.items()}
    off = {name: max(ratio, 1 / ratio) if ratio else inf for name, ratio in ratios.items()}
    far = {name: factor for name, factor in off.items() if factor > NOTICEABLE_FACTOR}
    if far:
        name = max(far, key=far.__getitem__)
        expected_s, found_s = (median(column) for column in zip(*collectives[name], strict=True))
        yield (
            f"collectives inside {len(far)} of {len(off)} groups are off, most of {name}: "
            f"{format_seconds(expected_s)} predicted in an operation, {format_seconds(found_s)} "
            "measured (medians); they share links with messages, from which these are calibrated, "
            "so that the difference counts as computation"
        )


# --- layers ---------------------------------------------------------------------------------------

Alike = tuple[str, int]
"""A type of single devices, and how many of them form a group; 1 without groups."""


def alike(plan: Plan, device: str) -> Alike:
    """Return what a device, or the devices of a group, are."""
    members = plan.members(device)
    return plan.cluster.type_of(members[0]), len(members)


def with_times(plan: Plan, found: Mapping[Alike, Mapping[str, MeasuredTimes]]) -> GraphRecord:
    """Return a plan's layer graph with measured times of single devices and of groups.

    Args:
        plan: whose groups' splits take those of groups.
        found: times by the name of the layer.
    """
    record, parallel = plan.model.graph, plan.tensor_parallel

    def measured(rows: Sequence[Row], members: int) -> tuple[Row, ...]:
        return tuple(
            row.model_copy(update={"measured": {**row.measured, **_of(found, members, row.name)}})
            for row in rows
        )

    update: dict[str, object] = {"layers": measured(record.layers, 1)}
    if parallel is not None:
        update["splits"] = tuple(
            split.model_copy(update={"layers": measured(split.layers, split.degree or 0)})
            if split.sequence == parallel.sequence
            else split
            for split in record.splits
        )
    return record.model_copy(update=update)


def _of(
    found: Mapping[Alike, Mapping[str, MeasuredTimes]], members: int, layer: str
) -> dict[str, MeasuredTimes]:
    return {
        kind: rows[layer]
        for (kind, count), rows in found.items()
        if count == members and layer in rows
    }
