"""Whether stages keep the rules of a job, and whether the rules name what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from planner.cluster.cluster import Cluster, node_of
from planner.errors import near
from planner.rules import Rules

Stage = tuple[Sequence[str], Sequence[str]]
"""The layers and the devices of a stage, by name."""


def devices_for(layer: str, rules: Rules, cluster: Cluster) -> frozenset[str]:
    """Return the devices that may hold the stage of a layer."""
    wanted = rules.place.get(layer)
    names = cluster.device_names
    if wanted is None:
        return frozenset(names)
    return frozenset(name for name in names if name in wanted or node_of(name) in wanted)


def unknown_layers(rules: Rules, layers: Collection[str]) -> Iterator[str]:
    """Yield the layers that rules name and a model does not have, with the remedy.

    Args:
        rules: of a job.
        layers: of the model.
    """
    rows = [(f"together[{n}]", row) for n, row in enumerate(rules.together)]
    for field, names in (*rows, ("place", tuple(rules.place))):
        for name in names:
            if name not in layers:
                yield f"job.rules.{field}: there is no layer {name!r}; {near(name, layers)}"


def unknown_devices(rules: Rules, cluster: Cluster, *, of_groups: bool) -> Iterator[str]:
    """Yield the devices and nodes that rules name and a cluster does not have, with the remedy.

    Args:
        rules: of a job.
        cluster: all of it: searches of some of its devices keep rules on all.
        of_groups: whether tensor-parallel groups hold the stages: rules then name nodes alone.
    """
    devices = cluster.device_names
    places = sorted({*map(node_of, devices), *(() if of_groups else devices)})
    what = "node" if of_groups else "node or device"
    rows = [(f"apart[{n}]", row, devices) for n, row in enumerate(rules.apart)]
    rows += [(f"place.{layer}", row, tuple(places)) for layer, row in rules.place.items()]
    for field, names, known in rows:
        for name in names:
            if name not in known:
                yield f"job.rules.{field}: there is no {what} {name!r}; {near(name, known)}"


def missing_price(rules: Rules, cluster: Cluster) -> Iterator[str]:
    """Yield that a limit on the price needs prices, where a device has none."""
    without = [name for name, price in cluster.prices_per_hour.items() if price is None]
    if rules.most_price_per_hour is not None and without:
        yield (
            f"job.rules.most_price_per_hour: device {without[0]!r} has no price; set "
            "price_per_hour of it or of its type in the cluster file"
        )


def broken(rules: Rules, stages: Sequence[Stage], cluster: Cluster) -> Iterator[str]:
    """Yield the rules that stages break, in words.

    Args:
        rules: of the job.
        stages: in pipeline order.
        cluster: of their devices.
    """
    used = dict.fromkeys(device for _, devices in stages for device in devices)
    nodes = dict.fromkeys(map(node_of, used))
    if rules.most_nodes is not None and len(nodes) > rules.most_nodes:
        yield f"most_nodes = {rules.most_nodes}, but stages are on {', '.join(nodes)}"
    limit = rules.most_price_per_hour
    if limit is not None:
        price = sum(cluster.prices_per_hour[name] or 0.0 for name in used)
        if price > limit * (1 + 1e-9):
            yield f"most_price_per_hour = {limit:g}, but its devices cost {price:g} an hour"
    stage_of = {layer: n for n, (layers, _) in enumerate(stages) for layer in layers}
    for names in rules.together:
        found = sorted({stage_of[name] for name in names})
        if len(found) > 1:
            yield f"layers {', '.join(names)} belong together, but are in stages {found}"
    for names in rules.apart:
        for one, other in combinations(names, 2):
            for n, (_, devices) in enumerate(stages):
                if one in devices and other in devices:
                    yield f"devices {one} and {other} are to be apart, but both hold stage {n}"
    yield from _misplaced(rules, stages, stage_of, cluster)


def _misplaced(
    rules: Rules, stages: Sequence[Stage], stage_of: Mapping[str, int], cluster: Cluster
) -> Iterator[str]:
    for layer, wanted in rules.place.items():
        may = devices_for(layer, rules, cluster)
        for device in stages[stage_of[layer]][1]:
            if device not in may:
                yield f"layer {layer} is to be on {', '.join(wanted)}, but its stage is on {device}"
