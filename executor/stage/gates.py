"""Gates: a forward that tells before it uses parameters, for weights that come in late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx, nn

from planner.tracing.sharing import attribute_of

BeforeUse = Callable[[Sequence[str]], None]
"""Told the names (FQNs) of parameters that are about to be used; returns once they may be."""


class _Gate(nn.Module):
    """Stands before the first operation that uses some parameters."""

    def __init__(self, names: Sequence[str], before_use: BeforeUse) -> None:
        super().__init__()
        self.names = names
        self.before_use = before_use

    def forward(self) -> None:
        self.before_use(self.names)


def put_gates(
    module: fx.GraphModule, parameters: Mapping[str, nn.Parameter], before_use: BeforeUse
) -> None:
    """Put a gate before each operation that is the first to use a parameter that trains.

    Args:
        module: rewritten in place.
        parameters: of the stage, by the model's own names (FQNs).
        before_use: told the names.
    """
    name_of = {id(p): name for name, p in parameters.items() if p.requires_grad}
    passed: set[str] = set()
    for number, node in enumerate(list(module.graph.nodes)):
        used = [n for n in node.all_input_nodes if n.op == "get_attr"]
        found = [name_of.get(id(attribute_of(module, str(n.target)))) for n in used]
        names = [name for name in dict.fromkeys(found) if name and name not in passed]
        if names and node.op != "output":
            passed.update(names)
            module.add_module(f"gate_{number}", _Gate(names, before_use))
            with module.graph.inserting_before(node):
                module.graph.call_module(f"gate_{number}")
    module.recompile()
