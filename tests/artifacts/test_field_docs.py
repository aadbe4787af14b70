"""Meanings of fields are read off docstrings, units off names."""

from planner.cluster.cluster import Link
from planner.cluster.hardware import LinkType
from planner.records.document import Record
from planner.records.field_docs import meanings_of, summary_of, unit_of


class Outer(Record):
    """What it is, see :class:`planner.job.Job`.

    More of it: ``x`` is
    on two lines.

    Attributes:
        first, second: of both, as
            :meth:`~Outer.save` says.
        third: of ``1:2``, which no colon divides: not this one.
    """

    first: int
    second: int
    third: int
    fourth: int


class Inner(Outer):
    """One that has another field.

    Attributes:
        fourth: its own.
        third: told anew.
    """


def test_an_entry_may_tell_several_fields_and_go_on_over_lines() -> None:
    assert meanings_of(Outer) == {
        "first": "of both, as `Outer.save` says.",
        "second": "of both, as `Outer.save` says.",
        "third": "of `1:2`, which no colon divides: not this one.",
    }


def test_a_record_has_the_meanings_of_the_one_it_extends_unless_it_tells_its_own() -> None:
    assert list(meanings_of(Inner)) == ["first", "second", "third", "fourth"]
    assert meanings_of(Inner)["third"] == "told anew."
    assert set(meanings_of(LinkType)) < set(meanings_of(Link))


def test_the_summary_ends_where_the_fields_begin() -> None:
    assert summary_of(Outer) == (
        "What it is, see `planner.job.Job`.\n\nMore of it: `x` is on two lines."
    )


def test_units_are_those_that_names_tell() -> None:
    told = {
        "iteration_time_s": "s",
        "latency_us": "µs",
        "stash_bytes": "bytes",
        "bytes": "bytes",
        "memory_gib": "GiB (2^30 bytes)",
        "bandwidth_gb_per_s": "10^9 bytes/s",
        "peak_tflop_per_s": "10^12 FLOP/s",
        "forward_flops": "FLOPs",
        "price_per_hour": "currency/h",
        "stages": "",
        "microbatches": "",
    }
    assert {name: unit_of(name) for name in told} == told
