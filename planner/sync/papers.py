"""The names that papers gave to synchronisation, as ``--sync`` accepts them."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Paper(NamedTuple):
    """A paper's synchronisation.

    Attributes:
        title: of the system, with its authors and where it was published.
        runs: the strategy that runs under the paper's name, with its options.
        differs: what of it differs from the paper.
    """

    title: str
    runs: str
    differs: str


_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
PAPERS: Mapping[str, Paper] = {name: Paper(**row) for name, row in tomllib.loads(_TEXT).items()}


def announce_paper(text: str) -> None:
    """Log which strategy runs under the name of a paper, and what differs from that.

    A paper whose name is the strategy's own, ``ad_psgd``, is told in README and docs alone.
    """
    name = text.partition(":")[0].strip()
    title, runs, differs = PAPERS.get(name, Paper("", name, ""))
    if runs.partition(":")[0] != name:
        logger.warning("--sync %s, %s, runs %s; it differs: %s", name, title, runs, differs)
