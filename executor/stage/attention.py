"""Selective recomputation: the core of attention runs again in the backward of its layer.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from executor.split.attention import CORE, CoreMark
from executor.stage.recompute import Run

RunAgain = Callable[[fx.GraphModule, Sequence[bool], bool], Run]
"""Makes a core run again in its backward: the core, whether each value that it returns takes a
gradient, and whether it draws random numbers."""


class _Core(nn.Module):
    """A core in the place of its operations."""

    def __init__(self, core: fx.GraphModule, again: Run) -> None:
        super().__init__()
        self.core = core
        self.again = again

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it; where nothing that it reads trains there is no backward to run it in again."""
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        found: tuple[Tensor, ...] = self.again(*inputs) if trains else self.core(*inputs)
        return found


def recompute_cores(module: fx.GraphModule, run_again: RunAgain) -> None:
    """Let every core that is marked in a graph run again in its backward.

    Args:
        module: rewritten in place.
        run_again: makes a core run so.
    """
    cores: dict[CoreMark, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if CORE in node.meta:
            cores.setdefault(node.meta[CORE], []).append(node)
    for mark, nodes in cores.items():
        _fold(module, mark, nodes, run_again)
    if cores:
        module.graph.lint()
        module.recompile()


def _fold(
    module: fx.GraphModule, mark: CoreMark, nodes: Sequence[fx.Node], run_again: RunAgain
) -> None:
    """Put one operation in the place of a core's."""
    inside = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    entering = [node for node in read if _is_tensor(node)]
    leaving = [node for node in nodes if not inside.issuperset(node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in entering}
    for node in (n for n in read if n not in copies):
        assert node.op == "get_attr", f"{node.name} is neither a tensor nor held by the stage"
        copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in leaving))
    core = fx.GraphModule(module, graph)
    differentiable = [node.meta["val"].is_floating_point() for node in leaving]
    name = f"attention_{mark.number}"
    module.add_module(name, _Core(core, run_again(core, differentiable, mark.is_random)))
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(entering))
    for place, node in enumerate(leaving):
        with module.graph.inserting_after(call):
            made = module.graph.call_function(operator.getitem, (call, place))
        made.meta = {key: value for key, value in node.meta.items() if key != CORE}
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
