"""Snippets of pages, run as a reader would."""

from pathlib import Path

import pytest
from documents import run_page
from page_groups import DOCS, GROUPS

pytestmark = pytest.mark.extensive


@pytest.mark.parametrize("page", GROUPS["plans"])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    run_page(DOCS / page, tmp_path)
