"""The strategies that are measured, by name."""

from __future__ import annotations

from planner.sync.simulation.comparison import ALL_STRATEGIES
from planner.sync.strategies import sync_name

PLAIN, OVERLAPPED = "all_reduce:overlap=false", "all_reduce"
STATIC, DRAWN = "partial_all_reduce:schedule=static", "partial_all_reduce"
SEMI, SEMI_BEHIND = "semi_decentralized", "semi_decentralized:overlap=true"
PAIRS, MATCHING = "ad_psgd", "ad_psgd:pairs=matching"
SERVER, ASYNC, EAGER = (
    "parameter_server",
    "parameter_server:mode=async",
    "eager_parameter_server",
)
PARTIAL = (DRAWN, SEMI, SEMI_BEHIND, PAIRS)
WAITING = (OVERLAPPED, SERVER, MATCHING, DRAWN)
"""One strategy of each kind whose workers wait for each other. Which form of AD-PSGD SDPipe's
authors ran we do not know; the bar itself is against every strategy."""
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, SERVER, PAIRS, STATIC, DRAWN, SEMI, SEMI_BEHIND)


def strategies_of(*, short: bool) -> tuple[str, ...]:
    """Names of the strategies that are run."""
    return SHORT_STRATEGIES if short else tuple(sync_name(sync) for sync in ALL_STRATEGIES)
