"""Pages with their snippets that take minutes: `pytest tests/docs/test_run_slow.py --slow`."""

from pathlib import Path

import pytest
from documents import SLOW, run_page
from page_groups import DOCS, steps

PAGES = [*sorted(path.name for path in DOCS.glob("*.md")), "../README.md"]
SLOW_PAGES = [page for page in PAGES if any(block.not_run == SLOW for block in steps(page))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_snippets_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--slow"):
        pytest.skip("takes minutes; run with --slow")
    run_page(DOCS / page, tmp_path, slowly=True)
