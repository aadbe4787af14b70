"""Snippets of pages, run as a reader would; with ``--slow`` also those that take minutes."""

from pathlib import Path

import pytest
from documents import SLOW, run_page
from page_groups import DOCS, PAGES, RUN, steps

ALONE = ("tutorial.md", "../README.md")
"""The longest pages, which run beside the others."""


@pytest.mark.extensive
@pytest.mark.parametrize("page", [page for page in RUN if page not in ALONE])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    run_page(DOCS / page, tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.not_run == SLOW for block in steps(page))]
)
def test_slow_snippets_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--slow"):
        pytest.skip("takes minutes; run with --slow")
    run_page(DOCS / page, tmp_path, slowly=True)
