"""Public docstrings are sentences that stand alone, not continuations of a name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planner", "executor", "benchmarks")
CONTINUATION = re.compile(r"(Of|To|That|Which|Whose|With|From|By)\b")
"""What continues a name ("of_chain": "Of a chain.") and says nothing without it."""
QUESTION = re.compile(r"(What|How|Whether|Where|As|At)\b")
"""What a function returns, without its verb; of a property it says what that is."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_docstrings(path: Path) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield the line, the node and the docstring of a module and of all that is public in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        docstring = ast.get_docstring(node)  # type: ignore[arg-type]
        if docstring is not None:
            yield node.body[0].lineno, node, docstring  # type: ignore[attr-defined]
        for child in node.body:  # type: ignore[attr-defined]
            is_named = isinstance(child, (ast.ClassDef, *FUNCTIONS))
            if is_named and not child.name.startswith("_"):
                pending += [child] if not isinstance(node, FUNCTIONS) else []


def faults(node: ast.AST, docstring: str) -> Iterator[str]:
    """Yield what is wrong with the first paragraph of a docstring."""
    first = " ".join(docstring.split("\n\n")[0].split())
    if first[:1].islower() and first[:1].isalpha():
        yield "begins with a small letter"
    if not first.rstrip("`)\"'").endswith((".", ":", "?", "!")) and "::" not in first[-3:]:
        yield "ends without a full stop"
    if CONTINUATION.match(first) or (is_function(node) and QUESTION.match(first)):
        yield "continues the name; write a sentence that stands alone"


def is_function(node: ast.AST) -> bool:
    """Tell functions and methods from properties, classes and modules."""
    if not isinstance(node, FUNCTIONS):
        return False
    return not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def offenders(room: str) -> list[str]:
    """Return ``FILE:LINE: FAULT: DOCSTRING`` for every docstring of a room that is no sentence."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {fault}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, node, docstring in public_docstrings(path)
        for fault in faults(node, docstring)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_public_docstrings_are_sentences(room: str) -> None:
    found = offenders(room)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Of a partition, that are looked at.", "continues the name"),
        ("Whether it fits.", "continues the name"),
        ("return the plan.", "small letter"),
        ("Return the plan", "full stop"),
        ("Return the plan.\n\nof a problem", None),
    ],
)
def test_fragments_are_found(docstring: str, fault: str | None) -> None:
    node = ast.parse("def of_partition(): pass").body[0]
    found = list(faults(node, docstring))
    assert (found == []) if fault is None else any(fault in one for one in found)


if __name__ == "__main__":
    for room in ROOMS:
        print("\n".join(offenders(room)))
