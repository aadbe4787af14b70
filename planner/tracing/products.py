"""The matrix products of exported operations, with their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from torch import fx

from planner.model.figures import Product
from planner.tracing.operators import MATRIX_PRODUCTS
from planner.tracing.sharing import operator_name, shape_of


def products_of(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, Product]]:
    """Yield the matrix products among operations; convolutions are none."""
    for node in nodes:
        name = operator_name(node) if node.op == "call_function" else ""
        if name not in MATRIX_PRODUCTS or "conv" in name:
            continue
        operands = _operands(node)
        if len(operands) != 2:
            continue
        shape, inner, batched = shape_of(node), shape_of(operands[0])[-1], is_batched(node)
        yield (
            node,
            Product(
                operator=name,
                batch=prod(shape[:-2]) if batched else 1,
                rows=shape[-2] if batched else prod(shape[:-1]),
                inner=inner,
                columns=shape[-1],
            ),
        )


def is_batched(node: fx.Node) -> bool:
    """Return whether a product is one of several matrices with as many others."""
    is_named_so = operator_name(node) in ("matmul", "bmm", "baddbmm")
    return is_named_so and len(shape_of(_operands(node)[1])) > 2


def _operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if len(shape_of(n)) > 1]
