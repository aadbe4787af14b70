"""The table of layers says what the graph says."""

import io

from builders import graph, layer, parameter
from rich.console import Console

from planner.model.layer_graph import LayerGraph
from planner.report.layers import layer_table


def shown(the_graph: LayerGraph) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(layer_table(the_graph))
    return console.file.getvalue()


def test_every_layer_has_a_row_with_its_figures():
    rows = [layer("embed", 1, 2, stash_bytes=3 * 10**6, parameters=["w"]), layer("head", 3, 4)]
    lines = shown(graph(rows, parameters=[parameter("w", 10**6)])).splitlines()
    row = next(line.split() for line in lines if "embed" in line)
    assert row == ["embed", "1000", "2000", *"3.815 MiB 2.861 MiB 953.7 MiB".split()]
    assert any("head" in line for line in lines)


def test_brackets_in_names_are_no_markup():
    rows = [layer("[/red]"), layer("[bold]b[/bold]")]
    names = {"name": "[/model]", "uncounted_operators": ["[/aten]"]}
    output = shown(graph(rows, flop_coverage=0.5, **names))
    for name in ("[/red]", "[bold]b[/bold]", "[/model]", "[/aten]"):
        assert name in output
