"""The layers of a plan of tensor-parallel groups, with the figures of all devices of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.cluster.cluster import Cluster
from planner.model.figures import PHASES, Product
from planner.model.graph_record import GraphRecord, Layer
from planner.model.split_record import LayerSplit, SplitRecord

_SUMS = (
    *(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes")),
    "stash_bytes",
    "again_bytes",
    "weight_stash_bytes",
)


def group_graph(
    graph: GraphRecord,
    split: SplitRecord | None,
    degree: int,
    types: Mapping[str, Iterable[str]],
    cluster: Cluster,
    *,
    in_parts: bool,
) -> GraphRecord:
    """Return the graph with the figures of all devices of a group together.

    Args:
        graph: of single devices.
        split: over groups of the degree; None of single devices, which have the graph's figures.
        degree: devices of a group.
        types: those of groups, by the types of their devices.
        cluster: of groups.
        in_parts: whether groups send each other parts of what all their devices have whole.
    """
    held = {row.name for region in split.regions for row in region.parameters} if split else set()
    whole = {row.name for row in split.boundaries if row.placement == "whole"} if split else set()
    summed = split.summed_parameters if split else ()
    grouped = {
        one: [kind for kind in kinds if cluster.device_types[kind].members == degree]
        for one, kinds in types.items()
    }
    layers = []
    for number, layer in enumerate(graph.layers):
        allowed = tuple(n for one in layer.device_types for n in types.get(one, (one,)))
        mine = layer.model_copy(update={"device_types": allowed})
        if split is None:
            layers.append(mine)
            continue
        shared, timed = split.layers[number], {}
        for one, kinds in grouped.items():
            if one in shared.measured:
                timed.update(dict.fromkeys(kinds, shared.measured[one]))
        of_group = _layer(mine, shared, degree - 1)
        layers.append(of_group.model_copy(update={"measured": timed}))
    return graph.model_copy(
        update={
            "layers": tuple(layers),
            "splits": (),
            "boundaries": tuple(
                row.model_copy(
                    update={
                        "bytes": row.bytes * (degree if row.name in whole else 1),
                        "parts": degree if in_parts and row.name in whole else 1,
                    }
                )
                for row in graph.boundaries
            ),
            "parameters": tuple(
                row.model_copy(
                    update={
                        "elements": row.elements * (1 if row.name in held else degree),
                        "bytes": row.bytes * (1 if row.name in held else degree),
                        "summed": row.name in summed,
                    }
                )
                for row in graph.parameters
            ),
        }
    )


def together(graphs: Mapping[int, GraphRecord], sizes: Mapping[str, int]) -> GraphRecord:
    """Return one graph for groups of several sizes, each with the figures of its own.

    Nothing of a plan's replay is taken from the other figures, which are those of the fewest
    devices.

    Args:
        graphs: by size.
        sizes: by the types of groups.
    """
    first = graphs[min(graphs)]
    if len(graphs) == 1:
        return first
    return first.model_copy(update={"on_types": {kind: graphs[n] for kind, n in sizes.items()}})


def _layer(layer: Layer, shared: LayerSplit, others: int) -> Layer:
    """Return what a group does: whatever is not shared, the other devices have and do as well."""
    sums = {}
    for name in _SUMS:
        whole = getattr(layer, name)
        # A layer that does not say otherwise keeps all of its stash.
        whole = layer.stash_bytes if whole is None else whole
        sums[name] = whole + others * (whole - getattr(shared, name))
    return layer.model_copy(
        update={
            **sums,
            "peak_bytes": None,
            "work": shared.work,
            "collectives": shared.collectives,
            "products": tuple(_share(row, others + 1) for row in shared.products),
        }
    )


def _share(product: Product, degree: int) -> Product:
    """Return what one device of a group computes of a product."""
    sizes = {name: getattr(product, name) for name in ("batch", "rows", "inner", "columns")}
    if product.split is not None:
        sizes[product.split] = max(1, sizes[product.split] // degree)
    return Product(operator=product.operator, **sizes)
