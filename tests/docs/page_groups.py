"""The pages whose snippets run, and why some snippets do not."""

from builders import ROOT
from documents import Block, blocks

DOCS = ROOT / "docs"
ELSEWHERE = {
    "own_constraints.md": "tests/solver/test_own_constraints.py",
    "sweep.md": "tests/sweeping/test_sweep_docs.py",
}
"""Pages whose files or results a test of their subject knows."""
REASONS = (
    *("needs several machines", "needs a GPU", "needs files of your own"),
    "needs a checkout",
    *("takes minutes", "changes settings"),
)
"""Why a block may be shown and not run; a reason begins with one of these."""
MOST_NOT_RUN = 12


def steps(page: str) -> list[Block]:
    """The blocks of a page that a reader runs or writes to a file."""
    return [block for block in blocks(DOCS / page) if block.is_step]


PAGES = [*sorted(path.name for path in DOCS.glob("*.md")), "../README.md"]
RUN = [
    page
    for page in PAGES
    if page not in ELSEWHERE and any(block.not_run is None for block in steps(page))
]
