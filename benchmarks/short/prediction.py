"""Claims about predicted iterations and memory, from any rows of that benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import prediction as full
from benchmarks.claims import Claim, Entry, LeftOut, details
from benchmarks.prediction_plans import MODELS

SOURCE = "our prediction from a profile; our own bar"


def entries(rows: Sequence[full.Row]) -> Iterator[Entry]:
    """Claims and the table of rows; what is left out of all models."""
    for bar in full.bars(rows):
        yield Claim(
            claim=bar.what,
            source=SOURCE,
            sense="at most",
            bar=bar.bar,
            figure=bar.value,
            unit="%",
            regime=f"{len(rows)} plans on two ranks",
        )
    yield details("Plans", full.COLUMNS, [full.cells(row) for row in rows])
    ran = {row.model for row in rows}
    left = [model.name for model in MODELS if model.name not in ran]
    if left:
        yield LeftOut(text="models " + ", ".join(left))
