"""Microbatches of unequal length: how often each length comes, and which ones an iteration has.

A job lists a few lengths, in positions of the sequence (tokens), and a microbatch has one of them.
The lengths of an iteration are a pure function of the job and of the iteration's number, so that
planner, checker and every rank know the shapes of all messages without telling each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planner.errors import PipeplanError, shorten
from planner.records.document import MOST_ENTRIES, Record

MOST_LENGTHS = 16
MOST_TRACE_BYTES = 2**20
SUM_TOLERANCE = 1e-6
"""The most by which a job's shares may miss 1, since people round them."""
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(gt=0, le=1)]
LengthOrder = Literal["any", "drawn", "longest_first", "shortest_first"]
ORDERS: tuple[LengthOrder, ...] = ("drawn", "longest_first", "shortest_first")
"""The orders that a plan may have; a job's ``any`` leaves the choice to the search."""


class Lengths(Record):
    """The lengths of a job's microbatches.

    Attributes:
        tokens: Lengths that microbatches have, ascending; the last is that of the model's own
            batch. Each takes a trace of the model and, on each rank, an exported copy of its
            stages.
        shares: Share of microbatches of each length; empty where ``trace`` says it.
        trace: Token counts of microbatches in the order in which they come, over and over; each
            has the shortest of ``tokens`` that is at least as long.
        order: Order of an iteration's microbatches: ``drawn``, ``longest_first`` or
            ``shortest_first``; ``any``: the best of these, which the plan's job says.
        iterations: Iterations from the first on whose times the predictions are of.
        seed: Of the lengths that are drawn by ``shares``.
    """

    tokens: Annotated[tuple[Tokens, ...], Field(min_length=2, max_length=MOST_LENGTHS)]
    shares: Annotated[tuple[Share, ...], Field(max_length=MOST_LENGTHS)] = ()
    trace: Annotated[tuple[Tokens, ...], Field(max_length=MOST_ENTRIES)] = ()
    order: LengthOrder = "any"
    iterations: Annotated[int, Field(ge=20, le=1000)] = 100
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Self:
        if any(first >= second for first, second in pairwise(self.tokens)):
            raise ValueError(f"tokens: {shorten(list(self.tokens))} do not ascend; sort them")
        if bool(self.shares) == bool(self.trace):
            raise ValueError(
                "shares and trace: "
                + ("both are given" if self.trace else "none is given")
                + "; give a share for each of tokens, or a trace of token counts"
            )
        if self.trace:
            self._require_trace()
            return self
        if len(self.shares) != len(self.tokens):
            raise ValueError(
                f"shares: {len(self.shares)} shares for {len(self.tokens)} tokens; give one each"
            )
        if abs(sum(self.shares) - 1) > SUM_TOLERANCE:
            raise ValueError(f"shares: their sum is {sum(self.shares):g}, expected 1")
        return self

    def _require_trace(self) -> None:
        if max(self.trace) > self.tokens[-1]:
            raise ValueError(
                f"trace: a microbatch of {max(self.trace)} tokens, but the longest of tokens is "
                f"{self.tokens[-1]}; add a length, or cut such microbatches"
            )
        unused = [self.tokens[k] for k, share in enumerate(self.all_shares) if not share]
        if unused:
            raise ValueError(
                f"tokens: the trace has no microbatch of {unused[0]} tokens; leave the length out"
            )

    @cached_property
    def all_shares(self) -> tuple[float, ...]:
        """The share of each length; they sum to 1."""
        if not self.trace:
            total = sum(self.shares)
            return tuple(share / total for share in self.shares)
        found = [0] * len(self.tokens)
        for count in self.trace:
            found[bisect_left(self.tokens, count)] += 1
        return tuple(count / len(self.trace) for count in found)

    @property
    def mean_tokens(self) -> float:
        """The length of a microbatch in the mean."""
        rows = zip(self.tokens, self.all_shares, strict=True)
        return sum(tokens * share for tokens, share in rows)

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        return tuple(accumulate(self.all_shares))[:-1]

    def of_iteration(self, iteration: int, microbatches: int) -> tuple[int, ...]:
        """Return the length of each microbatch of an iteration, by its place in ``tokens``.

        Args:
            iteration: its number, from 1.
            microbatches: of an iteration.
        """
        drawn = [self._drawn(iteration, number, microbatches) for number in range(microbatches)]
        if self.order == "longest_first":
            drawn.sort(reverse=True)
        elif self.order == "shortest_first":
            drawn.sort()
        return tuple(drawn)

    def _drawn(self, iteration: int, number: int, microbatches: int) -> int:
        if self.trace:
            place = (iteration - 1) * microbatches + number
            return bisect_left(self.tokens, self.trace[place % len(self.trace)])
        text = f"{self.seed} {iteration} {number}".encode()
        uniform = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") / 2**64
        return bisect_right(self._ends, uniform)

    def of_iterations(self, microbatches: int) -> Iterator[tuple[int, ...]]:
        """Yield the lengths of every iteration that predictions are of."""
        for iteration in range(1, self.iterations + 1):
            yield self.of_iteration(iteration, microbatches)

    def __str__(self) -> str:
        parts = (
            f"{tokens} tokens {share:.0%}"
            for tokens, share in zip(self.tokens, self.all_shares, strict=True)
        )
        return ", ".join(parts)


def with_trace_file(data: Any, path: Path) -> Any:
    """Return the data of a job file with the token counts of ``lengths.trace_file`` as its trace.

    Args:
        data: content of the job file.
        path: of the job file, whose folder a relative ``trace_file`` is in.

    Raises:
        PipeplanError: if the trace cannot be read, or is not of whole numbers.
    """
    table = data.get("lengths") if isinstance(data, Mapping) else None
    if not isinstance(table, Mapping) or "trace_file" not in table:
        return data
    kept = {name: value for name, value in table.items() if name != "trace_file"}
    if "trace" in kept:
        raise PipeplanError(f"{path}: lengths: trace and trace_file are given; keep one of them")
    return {**data, "lengths": {**kept, "trace": _read(path, table["trace_file"])}}


def _read(job: Path, name: object) -> list[int]:
    field = f"{job}: lengths.trace_file"
    if not isinstance(name, str):
        raise PipeplanError(f"{field}: {shorten(name)} is not the name of a file")
    path = job.parent / name
    try:
        with path.open("rb") as file:
            text = file.read(MOST_TRACE_BYTES + 1)
    except OSError as error:
        raise PipeplanError(f"{field}: {path} cannot be read: {error.strerror}") from None
    if len(text) > MOST_TRACE_BYTES:
        raise PipeplanError(
            f"{field}: {path} has more than {MOST_TRACE_BYTES} bytes; a part of the trace will do"
        )
    words = text.split()
    wrong = next((word for word in words if not word.isdigit() or len(word) > 10), None)
    if wrong is not None or not words:
        told = "nothing" if wrong is None else shorten(wrong.decode(errors="replace"))
        raise PipeplanError(
            f"{field}: {path} has {told}, expected whole numbers of tokens, one for each "
            "microbatch, with spaces or line ends between them"
        )
    return [int(word) for word in words]
