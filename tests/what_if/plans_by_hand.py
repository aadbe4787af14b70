"""Plans whose values under a change are worked out by hand, and the values that are found.

Forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

from chains import ALTERNATING, ONE_F_ONE_B, PAIR, chain, crowded

from planner.analysis.what_if import Value, parse_change, what_if
from planner.assembly import plan_by_hand
from planner.plan.plan import Plan


def chain_plan(*seconds: tuple[float, float], order: dict | None = None, **fields: object) -> Plan:
    """A stage on a device of its own for every (forward, backward), around one switch."""
    return plan_by_hand(chain(*seconds, **fields), order or PAIR)


def slow_second_stage() -> Plan:
    """1 s of fill, 4 * 12 s, 2 s of drain: 51 s."""
    return chain_plan((1, 2), (4, 8), microbatches=4, order=ONE_F_ONE_B)


def crowded_plan(
    memory_gib: float = 1.5, recompute: tuple[str, ...] = (), job_recompute: bool = True
) -> Plan:
    """A microbatch at a time on d0, whose stash is 1 GiB; alternating, 24 s."""
    return plan_by_hand(crowded(memory_gib, recompute, job_recompute=job_recompute), ALTERNATING)


def values(plan: Plan, *texts: str, **options: object) -> dict[str, Value]:
    found = what_if(plan, [parse_change(text) for text in texts], **options)
    return {value.change: value for value in found.values}


def value(plan: Plan, text: str, **options: object) -> Value:
    return values(plan, text, **options)[text]
