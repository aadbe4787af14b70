"""Copies of graph modules, to be rewritten."""

from torch import fx


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with the same parameters, buffers and operations, in a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return fx.GraphModule(module, graph)
