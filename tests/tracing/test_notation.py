"""What the rules of operators say, against the operators run on halves of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from planner.tracing.sharding.local import join, share
from planner.tracing.sharding.rules import Axis, Dimension, added_after, axes_of, results_of
from planner.tracing.sharing import operator_name, shape_of

VIEWS = ("view", "reshape", "flatten", "squeeze", "unflatten")


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(4, shape)


def heads(count: int = 4) -> Tensor:
    return floats(2, count, 6, 8)


attention = functional.scaled_dot_product_attention
# Functions, their operands, and the number of axes of their rules.
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "linear": (functional.linear, (floats(2, 4, 6), floats(8, 6), floats(8)), 4),
    "matmul": (torch.matmul, (floats(1, 4, 6, 8), floats(2, 4, 8, 6)), 5),
    "matmul of a matrix": (torch.matmul, (floats(2, 4, 6), floats(6, 8)), 4),
    "bmm": (torch.bmm, (floats(2, 4, 6), floats(2, 6, 8)), 4),
    "addmm": (torch.addmm, (floats(8), floats(4, 6), floats(6, 8)), 3),
    "addmm with a factor": (
        lambda *x: torch.addmm(*x, beta=2),
        (floats(8), floats(4, 6), floats(6, 8)),
        2,
    ),
    "softmax": (lambda x: x.softmax(1), (floats(2, 4, 6),), 2),
    "topk": (lambda x: x.topk(2, -1), (floats(2, 4, 6),), 2),
    "cumsum": (lambda x: x.cumsum(0), (floats(2, 4, 6),), 2),
    "layer_norm": (
        lambda x, w: functional.layer_norm(x, (4, 6), w),
        (floats(2, 4, 6), floats(4, 6)),
        1,
    ),
    "add": (torch.add, (floats(2, 1, 6), floats(4, 6)), 3),
    "where": (torch.where, (floats(4, 6) > 0, floats(2, 4, 6), floats(6)), 3),
    "transpose": (lambda x: x.transpose(0, 2), (floats(2, 4, 6),), 3),
    "permute": (lambda x: x.permute(2, 0, 1), (floats(2, 4, 6),), 3),
    "unflatten": (lambda x: x.unflatten(-1, (2, 4)), (floats(2, 8),), 2),
    "flatten": (lambda x: x.flatten(1), (floats(2, 4, 6),), 2),
    "view": (lambda x: x.view(4, 2, 12), (floats(8, 1, 12),), 2),
    "squeeze": (lambda x: x.squeeze(1), (floats(2, 1, 6),), 2),
    "unsqueeze": (lambda x: x.unsqueeze(1), (floats(2, 6),), 2),
    "select": (lambda x: x.select(1, 2), (floats(2, 4, 6),), 2),
    "slice": (lambda x: x[:, 1:3], (floats(2, 4, 6),), 2),
    "stack": (lambda *x: torch.stack(x, 1), (floats(2, 6), floats(2, 6)), 2),
    "cat": (lambda *x: torch.cat(x, -1), (floats(2, 4), floats(2, 8)), 2),
    "chunk": (lambda x: x.chunk(3, -1), (floats(2, 12),), 2),
    "sum": (lambda x: x.sum(1), (floats(2, 4, 6),), 3),
    "sum that keeps": (lambda x: x.sum((0, -1), keepdim=True), (floats(2, 4, 6),), 3),
    "mean": (lambda x: x.mean(1), (floats(2, 4, 6),), 2),
    "index": (lambda x, i: x[i], (floats(4, 6, 8), whole_numbers(2, 4)), 4),
    "gather": (lambda x, i: x.gather(1, i), (floats(2, 4, 6), whole_numbers(2, 2, 6)), 2),
    "scatter": (
        lambda x, i, y: x.scatter(-1, i, y),
        (floats(2, 4), whole_numbers(2, 2), floats(2, 2)),
        1,
    ),
    "attention": (attention, (heads(), heads(), heads()), 3),
    "attention of one value": (lambda x: attention(x, x, x), (heads(),), 2),
    "causal attention": (lambda *x: attention(*x, is_causal=True), (heads(), heads(), heads()), 2),
    "grouped attention": (
        lambda *x: attention(*x, enable_gqa=True),
        (heads(), heads(2), heads(2)),
        3,
    ),
    "attention with a mask": (attention, (heads(), heads(), heads(), floats(4, 6, 6)), 3),
}


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


def halves(value: Tensor, member: Dimension, axis: Axis) -> list[Tensor]:
    """Both shares of a value: of each piece, where an operation divides or joins it."""
    own, size = member[1], value.shape[member[1]]
    pieces = axis.pieces if member == axis.whole else [(member, 1)]
    return [share(value, own, [int(size * part) for _, part in pieces], 2, r) for r in (0, 1)]


def on_halves(node: fx.Node, axis: Axis, values: dict[fx.Node, Tensor]) -> list[Tensor]:
    """The results of an operation, joined or summed after two runs on halves."""
    runs = []
    for rank in (0, 1):
        read = dict(values)
        for member in axis.inputs:
            read[member[0]] = halves(values[member[0]], member, axis)[rank]
        for bias in added_after(node) if not axis.outputs and rank else ():
            read[bias] = torch.zeros_like(values[bias])
        target, args = node.target, list(fx.node.map_arg(node.args, read.__getitem__))
        if operator_name(node) in VIEWS:
            shape = [
                s // (1 + ((node, own) in axis.outputs)) for own, s in enumerate(shape_of(node))
            ]
            target, args = torch.ops.aten.reshape.default, [args[0], shape]
        assert callable(target)
        runs.append(target(*args, **node.kwargs))
    rows = [[run] if isinstance(run, Tensor) else list(run) for run in runs]
    if not axis.outputs:
        return [first + second for first, second in zip(*rows, strict=True)]
    found = []
    for place, result in results_of(node).items():
        ((_, own),) = (member for member in axis.outputs if member[0] is result)
        parts = axis.pieces if (result, own) == axis.whole else [((result, own), 1)]
        size = shape_of(result)[own]
        found.append(join([row[place] for row in rows], own, [int(size * p) for _, p in parts]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_halves_computes_what_its_rule_says(name: str) -> None:
    torch.manual_seed(0)
    function, operands, count = CASES[name]
    graph = torch.export.export(Called(function), operands, strict=False).module().graph
    values = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
    (node,) = (n for n in graph.nodes if n.op == "call_function" and axes_of(n))
    axes = axes_of(node)
    assert axes is not None
    assert len(axes) == count
    for axis in axes:
        expected = function(*operands)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        for found, wanted in zip(on_halves(node, axis, values), expected, strict=True):
            torch.testing.assert_close(found, wanted)
