"""Orders that no program can run are refused by name; tests/verifier checks the times of others."""

import pytest
from builders import orders
from chains import chain

from planner.errors import PipeplanError
from planner.program.lower.lower import lower_orders
from planner.program.replay import replay


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1B1", "d1 waits at 1B1"),
        ("0F0 0F1 0B0 0B1 0F0", "1F0 1B0 1F1 1B1", "d0 waits at 0F0"),
        ("0F0 0F1 0B0 0B1", "1F0 0F2 1B0 1F1 1B1", "d1 runs 0F2, but it has no stage 0"),
        ("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1", "d0 waits at 0B0, d1 waits at 1F0"),
    ],
)
def test_orders_that_never_end(first: str, second: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        replay(lower_orders(chain((1, 2), (1, 2)), orders(d0=first, d1=second)).program)
