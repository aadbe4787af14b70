"""Changed files in short: whatever stands in one, it is refused with named problems, or read."""

from pathlib import Path

import changed_files
import pytest
from changed_files import fuzzed


def test_changed_files_are_refused_or_read() -> None:
    outcome = fuzzed(60)
    assert outcome.faults == []
    assert outcome.counts["read"] + outcome.counts["refused"] == 60
    assert min(outcome.counts["read"], outcome.counts["refused"]) > 5


@pytest.mark.parametrize("failing", [ValueError("odd"), MemoryError()])
def test_an_exception_of_a_reader_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, failing: Exception
) -> None:
    def read(path: Path) -> None:
        raise failing

    monkeypatch.setattr(changed_files, "READERS", dict.fromkeys(changed_files.READERS, read))
    outcome = fuzzed(3)
    assert len(outcome.faults) == outcome.counts["failed"] == 3
