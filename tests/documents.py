"""Snippets of the documents: what they are, and running a page's as a reader would."""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from builders import ROOT
from warm_python import warm_python

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n\n?)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
SLOW = "takes minutes"
"""The reason of a block that only the slow run of the pages runs."""
_NAME_LINE = re.compile(r"# (\S+\.\w+)\n")
PROGRAMS = {"pipeplan": "planner.cli", "torchrun": "torch.distributed.run"}
_LIMIT = re.compile(r"(--time-limit |time_limit_s=)[1-9]\d*\b(?!\.)")
_PLAN = re.compile(r"^pipeplan plan (?:[^\n\\]|\\\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its name.
        language: after the fence, perhaps empty.
        title: the file it shows; None for none.
        text: between the fences.
        not_run: why it is not run; None if it is.
        line: in the page, from 1.
    """

    page: str
    language: str
    title: str | None
    text: str
    not_run: str | None
    line: int

    @property
    def is_step(self) -> bool:
        """Whether a reader runs it, or writes it to a file."""
        return self.title is not None or self.language in ("sh", "python")

    def is_run(self, *, slowly: bool) -> bool:
        """Whether the tests run it.

        Args:
            slowly: whether they take minutes for it.
        """
        return self.is_step and (self.not_run is None or (slowly and self.not_run == SLOW))


def blocks(page: Path) -> list[Block]:
    """All blocks of a page; one whose first line is ``# NAME.SUFFIX`` shows that file."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        named = _NAME_LINE.match(match["text"]) if match["language"] in ("toml", "python") else None
        title = match["title"] or (named[1] if named else None)
        line = text.count("\n", 0, match.start("language")) + 1
        row = (match["language"], title, match["text"], match["reason"], line)
        found.append(Block(page.name, *row))
    return found


def snippets(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks in one language."""
    return [block.text for block in blocks(page) if block.language == language]


def run_page(page: Path, folder: Path, *, slowly: bool = False) -> list[str]:
    """Do what a page says, block by block, in an empty folder beside the examples.

    Searches end soon, ``pipeplan plan`` in deterministic mode, unless it is done slowly:
    no page depends on what a search finds later, and a busy machine changes nothing.

    Args:
        page: its file.
        folder: to work in.
        slowly: run those blocks too that take minutes.

    Returns:
        What each block that ran printed.

    Raises:
        AssertionError: naming the page, the line and what the block printed, where one fails.
    """
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = _environment(folder)
    printed = []
    for block in blocks(page):
        if not block.is_run(slowly=slowly):
            continue
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")
            continue
        text = block.text if slowly else _with_short_searches(block.text)
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "python":
            command = [warm_python(), "-c", text]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        where = f"{page.name}, line {block.line}"
        assert done.returncode == 0, f"{where}: status {done.returncode}\n{done.stdout[-6000:]}"
        printed.append(done.stdout)
    return printed


def _with_short_searches(text: str) -> str:
    planned = _PLAN.sub(lambda command: f"pipeplan plan --deterministic {command[0][14:]}", text)
    return _LIMIT.sub(r"\g<1>0.5", planned)


def _environment(folder: Path) -> dict[str, str]:
    """One in which the programs are those of this checkout, installed or not."""
    programs = folder / ".programs"
    programs.mkdir()
    here = shlex.quote(warm_python())
    for name, words in {**{k: f"-m {v}" for k, v in PROGRAMS.items()}, "python": ""}.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {here} {words} "$@"\n')
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHON_EXEC": warm_python(),  # What torchrun starts ranks with.
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
