"""The Pareto front, against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.sweep.rows import pareto_front

rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])] * width))
)


@given(rows)
def test_a_row_is_on_the_front_unless_another_is_better_somewhere_and_worse_nowhere(
    costs: list[tuple[float, ...]],
) -> None:
    found = pareto_front(costs)
    for index, row in enumerate(costs):
        beaten = False
        for other in costs:
            no_worse = [o <= r for o, r in zip(other, row, strict=True)]
            better = [o < r for o, r in zip(other, row, strict=True)]
            beaten = beaten or (all(no_worse) and any(better))
        assert (index in found) == (not beaten)


def test_no_rows_have_no_front() -> None:
    assert pareto_front([]) == frozenset()
