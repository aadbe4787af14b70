"""docs/sweep.md, as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
from builders import ROOT
from typer.testing import CliRunner

from planner.cli import app

DOCUMENT = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def rows(text: str) -> list[tuple[str, ...]]:
    """Cluster, devices and batch of the lines of a table, and their marks."""
    return re.findall(r"^ +(\*?) +(a10+) +(\d of \d) +(\d x \d+)", text, re.MULTILINE)


def test_what_the_docs_show_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks("toml"):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None
        (tmp_path / name[1]).write_text(text)
    (command,) = [text for text in blocks("sh") if text.startswith("pipeplan sweep")]
    done = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
    assert done.exit_code == 0, done.output
    (shown,) = blocks("")
    assert rows(shown) == rows(done.output)
    assert len(rows(shown)) == 8
    assert (tmp_path / "sweep" / "front.svg").read_bytes().startswith(b"<?xml")

    (snippet,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(snippet, "docs/sweep.md", "exec"), names)  # noqa: S102 - our own document.
    assert names["result"].solved == 0  # type: ignore[attr-defined]
    front = [row for row in rows(shown) if row[0]]
    assert len(capsys.readouterr().out.splitlines()) == len(front)
