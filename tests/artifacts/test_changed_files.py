"""Changed files in short: whatever stands in one, it is refused with named problems, or read."""

from changed_files import fuzzed


def test_changed_files_are_refused_or_read() -> None:
    outcome = fuzzed(60)
    assert outcome.faults == []
    assert outcome.counts["read"] + outcome.counts["refused"] == 60
    assert min(outcome.counts["read"], outcome.counts["refused"]) > 5
