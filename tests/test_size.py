"""No room has more lines of Python than ``rooms.toml`` allows it."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from builders import ROOT

CEILINGS: dict[str, int] = tomllib.loads((ROOT / "rooms.toml").read_text())["ceilings"]


def lines_by_room(root: Path, rooms: set[str]) -> Counter[str]:
    """Count the lines of each Python file for the innermost room that contains it."""
    lines: Counter[str] = Counter()
    for top in sorted({room.split("/")[0] for room in rooms}):
        for path in (root / top).rglob("*.py"):
            inside = path.relative_to(root)
            room = next(str(folder) for folder in inside.parents if str(folder) in rooms)
            lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


LINES = lines_by_room(ROOT, set(CEILINGS))


@pytest.mark.parametrize("room", sorted(CEILINGS))
def test_no_room_is_larger_than_its_ceiling(room: str) -> None:
    lines, ceiling = LINES[room], CEILINGS[room]
    assert lines <= ceiling, (
        f"{room} has {lines} lines of Python, {lines - ceiling} more than its ceiling of "
        f"{ceiling} in rooms.toml; remove as many from {room}"
    )


def test_a_file_counts_for_the_innermost_room_alone(tmp_path: Path) -> None:
    for name, length in {"a/x.py": 2, "a/new/y.py": 3, "a/b/z.py": 4, "a/b/note.md": 9}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * length)
    assert lines_by_room(tmp_path, {"a", "a/b", "a/not_yet"}) == {"a": 5, "a/b": 4}
