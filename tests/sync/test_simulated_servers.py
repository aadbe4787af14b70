"""The simulated eager server, event by event."""

from dataclasses import replace

import pytest
from small_worlds import small_world

from planner.sync.simulation.run import Scenario, simulate_sync
from planner.sync.simulation.slowness import parse_slowness
from planner.sync.strategies import EagerParameterServerOptions, parse_sync


def test_staleness_is_what_a_worker_knows_of_updates_since_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages take 1 ms; the first worker computes 100 ms, the second 250 ms.

    ============ ====== ===== ================ ====== =====
    pushed after worker read  newest it knows  newer  leads to
    ============ ====== ===== ================ ====== =====
    100 ms       0      0     0                0      1
    200 ms       0      0     1, its own       1      2
    250 ms       1      0     0                0      3
    300 ms       0      1     2, its own       1      4
    400 ms       0      2     4, its own       2      5
    500 ms       0      4     5, its own       1      6
    500 ms       1      0     3, its own       3      7
    ============ ====== ===== ================ ====== =====

    tests/executor/test_state_between.py has the same sequence with real servers.
    """
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        EagerParameterServerOptions, "factor", lambda _, *given: noted.append(given) or 1.0
    )
    world = small_world(2, ranks=(replace(small_world().ranks[0], parameter_bytes=0),))
    trace, _ = parse_slowness("slow:1x2.5")
    simulate_sync(Scenario(world, 4, trace), parse_sync("eager_parameter_server"))
    assert [newer for newer, _ in noted[:5]] == [0, 1, 0, 1, 2]
    assert sorted(noted[5:7]) == [(1, 2), (3, 2)]
