"""Snippets of the longest pages: a file of tests, so that they run beside the others."""

from pathlib import Path

import pytest
from documents import run_page
from page_groups import DOCS
from test_run_pages import ALONE

pytestmark = pytest.mark.extensive


@pytest.mark.parametrize("page", ALONE)
def test_snippets_run(page: str, tmp_path: Path) -> None:
    run_page(DOCS / page, tmp_path)
