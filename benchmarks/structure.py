"""Print the shape of the code: sizes, imports, names, and the files that a microbatch passes.

Usage: python -m benchmarks.structure [--static] [--names]

Four processes train a tiny GPT to find out which files of executor/ an iteration passes through,
from the end of one optimizer step to the end of the next; --static leaves that out. --names lists
what was counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import networkx as nx

from benchmarks import ROOT
from benchmarks.harness import table

FOLDERS = ("planner", "executor", "benchmarks", "tests")
PRODUCT = FOLDERS[:2]
STEPS, RANKS = 3, 4
Trees = Mapping[str, ast.Module]
"""Modules by their dotted names; the name of a package is that of its ``__init__.py``."""


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--rank"]:
        _rank(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--static", action="store_true", help="train nothing")
    parser.add_argument("--names", action="store_true", help="list what was counted")
    options = parser.parse_args()
    trees = {name: tree for folder in PRODUCT for name, tree in _trees(folder).items()}
    graph = import_graph(trees)
    groups = [sorted(group) for group in nx.strongly_connected_components(graph)]
    counted: dict[str, list[Any]] = {
        "modules of planner/ and executor/": sorted(trees),
        "modules with exactly one importer": sorted(n for n, d in graph.in_degree() if d == 1),
        "import cycles between modules": [group for group in groups if len(group) > 1],
        "class names with two meanings": ambiguous_classes(trees),
    }
    for kind in () if options.static else ("whole", "split"):
        counted[f"files on a microbatch's way, {kind} backward"] = files_on_the_way(kind)
    rows = [*(_size(folder) for folder in FOLDERS), *((k, len(v)) for k, v in counted.items())]
    print(table(("what", "now"), rows))
    if options.names:
        print(json.dumps(counted, indent=1))


def _size(folder: str) -> tuple[str, str]:
    """Return lines and files of a folder, and how long its functions are."""
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    ninetieth = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    lines = sum(len(text.splitlines()) for text in texts)
    told = f"{statistics.median(lengths):g} / {ninetieth:g} / {max(lengths)}"
    title = f"{folder}/: lines, files, function length (median / 90 % / longest)"
    return title, f"{lines:,}, {len(texts)}, {told}"


# --- imports and names ----------------------------------------------------------------------------


def _trees(folder: str) -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return found


def import_graph(trees: Trees) -> nx.DiGraph:
    """Return the graph of absolute imports, an edge from the importer to the imported.

    Imports inside functions count like those at the top; those below ``if TYPE_CHECKING:`` do not.
    ``from package import name`` imports the module ``package.name`` where there is one.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(trees)
    for module, tree in trees.items():
        for node in _run_nodes(tree):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names = (inside & trees.keys()) or {str(node.module)}
            else:
                continue
            graph.add_edges_from((module, name) for name in names & trees.keys() - {module})
    return graph


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without what only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        waiting += node.orelse if is_typing else ast.iter_child_nodes(node)


def ambiguous_classes(trees: Trees) -> list[str]:
    """Return the public names of classes that more than one module defines at its top."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(module)
    return sorted(name for name, modules in places.items() if len(modules) > 1)


# --- the way of a microbatch ----------------------------------------------------------------------


def files_on_the_way(backward: str) -> list[str]:
    """Return the files of executor/ that the iterations of all ranks pass through.

    The plan has two stages of two replicas each, so that microbatches pass between stages and
    gradients between replicas.

    Raises:
        RuntimeError: if the training fails; with its last lines.
    """
    from benchmarks.executor.overhead import REPLICATED, pipelines
    from planner.assembly import plan_by_hand
    from planner.schedules.assignment import balanced_assignment
    from planner.schedules.published import published_orders
    from planner.schedules.split import split_backwards

    pipeline = dict(pipelines())[REPLICATED]
    orders = dict(published_orders(pipeline, balanced_assignment(pipeline), split=False))["1f1b"]
    if backward == "split":
        orders = {device: split_backwards(order) for device, order in orders.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.json"
        plan_by_hand(pipeline, orders).save(plan)
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words += ["-m", "benchmarks.structure", "--rank", name, str(plan), "--steps", str(STEPS)]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the training failed:\n{done.stderr[-4000:]}")
        found = [json.loads((folder / f"{rank}.files").read_text()) for rank in range(RANKS)]
    return sorted({path for files in found for path in files})


def _rank(folder: Path, words: list[str]) -> None:
    """Train as a rank of the executor does, and write the files that iterations pass through."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import executor.__main__

    root = f"{ROOT / 'executor'}/"
    called: set[str] = set()
    iterations: list[set[str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            called.add(frame.f_code.co_filename)

    def end_step(*_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            note(frame, "call", None)
            frame = frame.f_back
        iterations.append(set(called))
        called.clear()

    register_optimizer_step_post_hook(end_step)
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv[1:] = words
    status = executor.__main__.main()
    sys.setprofile(None)
    # What comes before the end of the first step is preparation.
    files = sorted(path.removeprefix(root) for path in set().union(*iterations[1:]))
    (folder / f"{os.environ['RANK']}.files").write_text(json.dumps(files))
    os._exit(status)


if __name__ == "__main__":
    main()
