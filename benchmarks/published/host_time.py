"""Host times of runtimes, each found from one published row that is then not scored.

Sources publish times of layers and messages, not what their host adds. Which of the figures of a
runtime stands for it follows from the source's code; its value from the one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.plan.runtime_rules import RuntimeRules
from planner.units import MEASURED_DIGITS, significant

STEPS = 16
"""Halvings: the value is then as exact as a measured time."""


@dataclass(frozen=True)
class HostTime:
    """A figure of a runtime that its source does not publish.

    Attributes:
        where: the software and machine that it is of.
        figure: of :class:`planner.plan.runtime_rules.RuntimeBehaviour`.
        at_most: of the figure, or of its inverse if it is a bandwidth.
        because: what in the source's code it stands for.
    """

    where: str
    figure: Literal["computation_us", "message_copy_gb_per_s"]
    at_most: float
    because: str

    def rules(self, rules: RuntimeRules, value: float) -> RuntimeRules:
        """Return a runtime with this value."""
        update = {self.figure: value}
        rows = (rules.behaviour, rules.interleaved)
        behaviour, interleaved = (row and row.model_copy(update=update) for row in rows)
        return rules.model_copy(update={"behaviour": behaviour, "interleaved": interleaved})

    def found(self, measured_s: float, predicted_s: Callable[[float], float]) -> float:
        """Return the value at which a row is predicted as measured, the nearest if there is none.

        Args:
            measured_s: of the row.
            predicted_s: its predicted seconds by the value, which rise with host time.
        """
        is_bandwidth = self.figure.endswith("gb_per_s")
        low, high = 0.0, self.at_most
        for _ in range(STEPS):
            middle = (low + high) / 2
            is_short = predicted_s(1 / middle if is_bandwidth else middle) < measured_s
            low, high = (middle, high) if is_short else (low, middle)
        return significant(1 / high if is_bandwidth else high, MEASURED_DIGITS)


HostTimes = Mapping[HostTime, float]


def host_lines(found: HostTimes, rows: Mapping[HostTime, str]) -> Sequence[str]:
    """Return a line of the report for each."""
    return [
        f"- {host.where}: `{host.figure} = {value:g}`, from the row {rows[host]}. {host.because}\n"
        for host, value in found.items()
    ]
