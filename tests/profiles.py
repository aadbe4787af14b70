"""Tiny profiles in the syntax of PipeDream and DAPPLE."""

from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent

from planner.interop.importing.formats import read_profile
from planner.interop.importing.imported import Imported, ImportOptions

# A residual block behind an input: tabs, decimal bytes, names as torch prints modules.
PIPEDREAM = dedent(
    """\
    node3 -- ReLU(inplace) -- forward_compute_time=0.500, backward_compute_time=0.250, \
    activation_size=800.000, parameter_size=0.000
    node1 -- Input0 -- forward_compute_time=2.000, backward_compute_time=0.000, \
    activation_size=400.000, parameter_size=0.000
    node2 -- Linear(in_features=10, out_features=20, bias=True) -- forward_compute_time=1.000, \
    backward_compute_time=3.000, activation_size=800.000, parameter_size=880.000
    node4 -- Add -- forward_compute_time=0.125, backward_compute_time=0.000, \
    activation_size=800.000, parameter_size=0.000
    node5 -- Linear(in_features=20, out_features=1, bias=True) -- forward_compute_time=0.250, \
    backward_compute_time=1.000, activation_size=40.000, parameter_size=84.000
    \tnode4 -- node5
    \tnode2 -- node3
    \tnode3 -- node4
    \tnode2 -- node4
    \tnode1 -- node2
    """
)

# Integers, a blank behind a line, two spaces before edges, no line end at the end.
DAPPLE = dedent(
    """\
    node1 -- input_ids -- forward_compute_time=0.01, backward_compute_time=0, \
    activation_size=9216, parameter_size=0
    node2 -- attention_mask -- forward_compute_time=0.011, backward_compute_time=0, \
    activation_size=3000, parameter_size=0\x20
    node3 -- embeddings -- forward_compute_time=0.056, backward_compute_time=0, \
    activation_size=12000, parameter_size=127000
    node4 -- layer_0 -- forward_compute_time=8.07, backward_compute_time=13.4, \
    activation_size=12000, parameter_size=50000
    node5 -- layer_1 -- forward_compute_time=8.07, backward_compute_time=13.4, \
    activation_size=12000, parameter_size=50000
      node1 -- node3
      node3 -- node4
      node2 -- node4
      node4 -- node5
      node2 -- node5"""
)


def node(
    identifier: str,
    name: str = "Op",
    forward: object = 1,
    backward: object = 2,
    activation: object = 100,
    parameters: object = 0,
) -> str:
    """A node line."""
    return (
        f"{identifier} -- {name} -- forward_compute_time={forward}, "
        f"backward_compute_time={backward}, activation_size={activation}, "
        f"parameter_size={parameters}"
    )


def profile(nodes: Iterable[str], edges: str = "") -> str:
    """A profile of node lines and of edges such as ``"a>b b>c"``."""
    pairs = (edge.split(">") for edge in edges.split())
    return "\n".join([*nodes, *(f"\t{first} -- {second}" for first, second in pairs)]) + "\n"


def imported(folder: Path, text: str, name: str = "model.txt", **options: object) -> Imported:
    """What is read from a text."""
    path = folder / name
    path.write_text(text)
    return read_profile(path, ImportOptions(**options))
