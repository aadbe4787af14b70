"""docs/sweep.md, as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
from builders import ROOT
from documents import blocks, snippets
from typer.testing import CliRunner

from planner.cli.commands import app

pytestmark = pytest.mark.extensive

DOCUMENT = ROOT / "docs" / "sweep.md"


def rows(text: str) -> list[tuple[str, ...]]:
    """Cluster, devices and batch of the lines of a table, and their marks."""
    return re.findall(r"^ *(\*?) +(a10+) +(\d of \d) +(\d x \d+)", text, re.MULTILINE)


def test_what_the_docs_show_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(DOCUMENT):
        if block.language == "toml":
            assert block.title is not None
            (tmp_path / block.title).write_text(block.text)
    (command,) = [text for text in snippets(DOCUMENT, "sh") if text.startswith("pipeplan sweep")]
    done = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
    assert done.exit_code == 0, done.output
    (shown,) = snippets(DOCUMENT, "")
    assert rows(shown) == rows(done.output)
    assert len(rows(shown)) == 8

    (snippet,) = snippets(DOCUMENT, "python")
    names: dict[str, object] = {}
    exec(compile(snippet, "docs/sweep.md", "exec"), names)  # noqa: S102 - our own document.
    assert names["result"].solved == 0  # type: ignore[attr-defined]
    front = [row for row in rows(shown) if row[0]]
    assert len(capsys.readouterr().out.splitlines()) == len(front)
