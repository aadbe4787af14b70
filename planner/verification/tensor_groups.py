"""A plan of tensor-parallel groups as the checker sees it: each group is one device.

Written from docs/cost_model.md; shares nothing with the planner's own contraction of a cluster.
That the groups are some of the cluster's, and the model has such a split, is for the problem to say
(:attr:`planner.plan.plan.Plan.problem`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import ceil, log2

from planner.cluster.cluster import Cluster, Device, Link
from planner.cluster.cluster_file import Host
from planner.cluster.hardware import ClassEfficiency, CollectiveFigures, DeviceType, GroupFigures
from planner.cluster.tensor_groups import TensorGroup
from planner.errors import PipeplanError
from planner.model.figures import CollectiveKind
from planner.model.graph_record import graph_digest
from planner.model.split_record import SplitRecord
from planner.plan.plan import Plan
from planner.units import listed
from planner.verification.group_layers import group_graph, together
from planner.verification.routes import Edge, Routes, ring_and_tree


def group_problems(plan: Plan) -> Iterator[str]:
    """Yield why a plan's groups are none that its job, its runtime and its splits allow."""
    parallel, allowed, degrees = plan.tensor_parallel, plan.job.tensor_parallel, plan.degrees
    for name, kind in plan.cluster.device_types.items():
        if kind.group is not None:
            yield (
                f"cluster.device_types.{name}.group: a plan has the cluster's single devices; name "
                "the groups in tensor_parallel"
            )
    if plan.model.graph.on_types:
        yield (
            "model.graph.on_types: a plan has the figures of single devices; name the groups in "
            "tensor_parallel"
        )
    if allowed != "any" and degrees != (allowed,):
        sizes = listed(degrees)
        remedy = sizes if len(degrees) == 1 else '"any"'
        yield (
            f"tensor_parallel: a replica of a stage is {sizes} devices, but job.tensor_parallel is "
            f"{allowed}; plan again, or set the job's to {remedy}"
        )
    if parallel is None:
        return
    if degrees == (1,):
        yield "tensor_parallel.groups: each has one device; remove tensor_parallel"
    if parallel.degree is not None and degrees != (parallel.degree,):
        sizes = listed(degrees)
        yield f"tensor_parallel.degree: {parallel.degree}, but groups have {sizes} devices"
    if len({group.name for group in parallel.groups}) < len(parallel.groups):
        yield "tensor_parallel.groups: several have the same name; give each its own"
    if parallel.sequence != plan.job.sequence_parallel:
        yield (
            f"tensor_parallel.sequence: {str(parallel.sequence).lower()}, but "
            f"job.sequence_parallel is {str(plan.job.sequence_parallel).lower()}; make them equal"
        )
    if plan.job.runtime not in (None, "pipeplan") and len(degrees) > 1:
        yield (
            f"tensor_parallel.groups: they have {listed(degrees)} devices, "
            f"but {plan.job.runtime} has groups of one size; set job.runtime to null"
        )
    for split in _splits(plan).values():
        yield from _experts(split)
    try:
        _ = plan.problem
    except PipeplanError as error:
        yield from error.problems


def _experts(split: SplitRecord) -> Iterator[str]:
    """Yield how a split's regions are not those that it says of experts."""
    regions = [region for region in split.regions if region.kind == "experts"]
    field, loads = f"model.graph.splits: of degree {split.degree},", split.expert_load
    if split.experts != bool(regions):
        said = str(split.experts).lower()
        yield f"{field} experts is {said}, but {len(regions)} regions are experts; plan again"
    if len(loads) not in (0, 1, len(regions)):
        yield (
            f"{field} {len(loads)} lists of expert_load for {len(regions)} layers with experts; "
            "plan again"
        )
        return
    for number, region in enumerate(regions):
        count = region.sizes[0] if len(region.sizes) == 1 else 0
        known = len(loads[number % len(loads)]) if loads else count
        if count < 1 or count % (split.degree or 1) or known != count:
            yield (
                f"{field} {list(region.sizes)} experts of {', '.join(region.layers)} do not fit "
                f"{split.degree} devices and {known} loads; plan again"
            )


def _splits(plan: Plan) -> dict[int, SplitRecord]:
    """Return how the model splits over the plan's groups, by their size."""
    parallel = plan.tensor_parallel
    return {
        row.degree: row
        for row in (plan.model.graph.splits if parallel else ())
        if row.degree in plan.degrees and parallel and row.sequence == parallel.sequence
    }


def divided_regions(plan: Plan) -> Iterator[str]:
    """Yield cuts at tensors of which every device of a group has a share inside a split part."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layers}
    inside = {
        row.name
        for split in _splits(plan).values()
        for row in split.boundaries
        if row.placement == "region"
    }
    for tensor in plan.model.graph.boundaries:
        stages = {stage_of.get(name) for name in (tensor.producer, *tensor.users)}
        if tensor.name in inside and len(stages) > 1:
            yield (
                f"stages: {tensor.name!r} is inside a part of the model that is split over a "
                f"group, and goes from {tensor.producer!r} to another stage; keep its layers in "
                "one stage"
            )


def contracted(plan: Plan) -> Plan:
    """Return the plan on a cluster of its groups; itself if it has none.

    Args:
        plan: of groups that its problem has.
    """
    if plan.tensor_parallel is None:
        return plan
    groups = plan.tensor_parallel.groups
    cluster = _cluster(plan.cluster, groups)
    one_of = {row.name: plan.cluster.type_of(row.devices[0]) for row in groups}
    types: dict[str, dict[str, None]] = defaultdict(dict)
    for device in cluster.devices:
        types[one_of[device.name]][device.type] = None
    splits, in_parts = _splits(plan), plan.runtime.group_messages == "parts"
    graphs = {
        degree: group_graph(
            plan.model.graph, splits.get(degree), degree, types, cluster, in_parts=in_parts
        )
        for degree in plan.degrees
    }
    sizes = {row.type: cluster.device_types[row.type].members for row in cluster.devices}
    graph = together(graphs, sizes)
    model = plan.model.model_copy(update={"graph": graph, "graph_digest": graph_digest(graph)})
    return plan.model_copy(update={"model": model, "cluster": cluster, "tensor_parallel": None})


# --- the cluster ----------------------------------------------------------------------------------


def _cluster(cluster: Cluster, groups: tuple[TensorGroup, ...]) -> Cluster:
    """Return the cluster of groups."""
    inside = _inside(cluster, [row for row in groups if len(row.devices) > 1])
    single = [cluster.type_of(row.devices[0]) for row in groups if len(row.devices) == 1]
    kinds = {name: cluster.device_types[name] for name in single}
    devices = []
    for group in groups:
        name = one = cluster.type_of(group.devices[0])
        if group.name in inside:
            figures = _type(cluster, group, inside[group.name])
            stem, number = f"{one}x{len(group.devices)}", 1
            name = stem
            while kinds.setdefault(name, figures) != figures:
                number += 1
                name = f"{stem}-{number}"
        devices.append(Device(name=group.name, type=name))
    return Cluster(
        name=cluster.name,
        device_types=kinds,
        devices=tuple(devices),
        switches=cluster.switches,
        links=tuple(_links(cluster, groups)),
        hosts=tuple(_hosts(cluster, groups)),
    )


def _ways(devices: tuple[str, ...]) -> dict[CollectiveKind, list[tuple[int, float, list[Edge]]]]:
    """Return each collective's algorithms: steps, share of the tensor an edge carries, edges."""
    size, (ring, tree) = len(devices), ring_and_tree(devices)
    half = (size - 1, 1 / size, ring)
    return {
        "all_reduce": [(2 * (size - 1), 1 / size, ring), (2 * ceil(log2(size)), 1.0, tree)],
        "all_gather": [half],
        "reduce_scatter": [half],
        "all_to_all": [(1, 1 / size, list(permutations(devices, 2)))],
    }


def _inside(cluster: Cluster, groups: Sequence[TensorGroup]) -> dict[str, GroupFigures]:
    """Return the collectives of every group, as if all groups ran the same one at a time."""
    routes, ways = Routes(cluster), {group.name: _ways(group.devices) for group in groups}
    found: dict[str, dict[CollectiveKind, tuple[CollectiveFigures, ...]]]
    found = {group.name: {} for group in groups}
    for kind, algorithms in ways[groups[0].name].items() if groups else ():
        for number in range(len(algorithms)):
            everyone = [edge for rows in ways.values() for edge in rows[kind][number][2]]
            figures = iter(routes.step_figures(everyone))
            for name, rows in ways.items():
                steps, share, edges = rows[kind][number]
                latencies, widths = zip(*(next(figures) for _ in edges), strict=True)
                row = CollectiveFigures(
                    latency_us=steps * max(latencies) * 1e6,
                    gb_per_s=min(widths) / (steps * share) / 1e9,
                )
                found[name][kind] = (*found[name].get(kind, ()), row)
    return {
        group.name: GroupFigures(devices=len(group.devices), collectives=found[group.name])
        for group in groups
    }


def _type(cluster: Cluster, group: TensorGroup, inside: GroupFigures) -> DeviceType:
    """Return a group's figures: sums over its devices, slowed as they slow each other."""
    one, size = cluster.device_type(group.devices[0]), len(group.devices)
    host = cluster.host_of.get(group.devices[0])
    factor = 1.0 if host is None else host.slowdown[size - 1]
    return one.model_copy(
        update={
            **_slower(one, factor),
            "by_class": {
                name: row.model_copy(update=_slower(row, factor))
                for name, row in one.by_class.items()
            },
            "operation_overhead_us": one.operation_overhead_us * factor,
            "memory_gib": size * one.memory_gib,
            "reserved_gib": size * one.reserved_gib,
            "memory_bandwidth_gb_per_s": size * one.memory_bandwidth_gb_per_s,
            "peak_tflop_per_s": {name: size * x for name, x in one.peak_tflop_per_s.items()},
            "group": inside,
        }
    )


def _slower(figures: DeviceType | ClassEfficiency, factor: float) -> dict[str, float | None]:
    """Return efficiencies and ramp-up of operations that take a factor longer."""
    rate, share, ramp_up_us = (
        figures.efficiency,
        figures.bandwidth_efficiency,
        figures.ramp_up_us,
    )
    return {
        "efficiency": None if rate is None else rate / factor,
        "bandwidth_efficiency": None if share is None else share / factor,
        "ramp_up_us": None if ramp_up_us is None else ramp_up_us * factor,
    }


def _links(cluster: Cluster, groups: tuple[TensorGroup, ...]) -> Iterator[Link]:
    """Yield links between groups and switches; those of a group to one other end add up."""
    group_of = {device: group.name for group in groups for device in group.devices}
    known = {*group_of, *cluster.switches}
    added: dict[frozenset[str], list[tuple[str, str, Link]]] = defaultdict(list)
    for link in cluster.links:
        if not known.issuperset(link.between):
            continue
        one, other = (group_of.get(end, end) for end in link.between)
        if one == other:
            continue
        if known.difference(group_of).issuperset(link.between):
            yield link
        else:
            added[frozenset((one, other))].append((one, other, link))
    for rows in added.values():
        one, other, first = rows[0]
        links = [link for _, _, link in rows]
        yield first.model_copy(
            update={
                "between": (one, other),
                "bandwidth_gb_per_s": sum(link.bandwidth_gb_per_s for link in links),
                "latency_us": max(link.latency_us for link in links),
                "duplex": "full" if {link.duplex for link in links} == {"full"} else "half",
                "shared": all(link.shared for link in links),
            }
        )


def _hosts(cluster: Cluster, groups: tuple[TensorGroup, ...]) -> Iterator[Host]:
    """Yield how groups of a host slow each other, beyond what one of them is slowed."""
    for host in cluster.hosts:
        held = [group for group in groups if set(group.devices) <= set(host.devices)]
        counts = [len(group.devices) * number for number, group in enumerate(held, 1)]
        if held:
            alone = host.slowdown[counts[0] - 1]
            slowdown = tuple(host.slowdown[count - 1] / alone for count in counts)
            yield Host(devices=tuple(group.name for group in held), slowdown=slowdown)
