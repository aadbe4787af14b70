"""Every snippet of the pages is run by some test, or says why not."""

import ast
import shlex
import tomllib

import pytest
import typer
from builders import ROOT
from documents import SLOW, Block, blocks
from page_groups import DOCS, ELSEWHERE, MOST_NOT_RUN, REASONS, steps

from executor.coordinator.__main__ import parser as coordinator_parser
from executor.detect.options import parser as measure_links_parser
from executor.launch import command_line
from planner.cli.commands import app

PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def not_run() -> list[Block]:
    return [block for page in PAGES for block in steps(page) if block.not_run is not None]


def test_pages_run_elsewhere_are_named_there() -> None:
    for page, test in ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / test).read_text()


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    for block in not_run():
        assert block.not_run is not None
        assert block.not_run.startswith(REASONS), f"{block.page}, line {block.line}"
    never = [block for block in not_run() if block.not_run != SLOW]
    assert len(never) <= MOST_NOT_RUN, [f"{b.page}:{b.line} {b.not_run}" for b in never]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_well_formed_at_least(page: str) -> None:
    for block in blocks(DOCS / page):
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "python":
            ast.parse(block.text)


def commands_not_run() -> list[tuple[str, list[str]]]:
    """Command lines with where they stand, `$variables` and comments as they are written."""
    return [
        (f"{block.page}, line {block.line}", words)
        for block in not_run()
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]


def test_pipeplan_takes_the_options_of_commands_that_are_not_run() -> None:
    group = typer.main.get_command(app)
    found = [(where, words[1:]) for where, words in commands_not_run() if words[0] == "pipeplan"]
    for where, (name, *options) in found:
        if name in group.commands:
            assert group.commands[name].make_context(name, options), where
        else:
            assert name in {option for p in group.params for option in p.opts}, where
    assert len(found) > 15


PARSERS = {
    "executor": command_line.parser,
    "executor.detect": measure_links_parser,
    "executor.coordinator": coordinator_parser,
}


def test_the_executor_takes_the_options_of_commands_that_are_not_run() -> None:
    found = [
        words[words.index("-m") + 1 :]
        for _, words in commands_not_run()
        if words[0] in ("torchrun", "python") and words[words.index("-m") + 1] in PARSERS
    ]
    for name, *options in found:
        assert PARSERS[name]().parse_args(options)
    assert {name for name, *_ in found} == set(PARSERS)


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_of_a_page_is_read(page: str) -> None:
    """A fence that the tests do not understand would hide a snippet."""
    fences = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(blocks(DOCS / page))
