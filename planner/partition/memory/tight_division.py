"""Divisions of the layers that fit in fact.

:class:`Division` takes each stage's least stash from a table that counts tensors shared by several
layers as kept for nothing. Here the stages of every division it finds are looked at one by one and
the table is raised to what recomputation can reach, until a division stands.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.partition.chain import Chain, Partition
from planner.partition.memory.division import Division
from planner.partition.memory.recompute import Holding, RecomputeChooser

MOST_ROUNDS = 200
"""Divisions looked at; a handful is the rule."""
TOLERANCE = 1e-3
"""How far above the least stash the one that is found may lie."""
TypedStages = list[tuple[int, int, str]]


class TightDivision:
    """A :class:`Division` whose table is raised where its own divisions show it to be too low.

    Args:
        chain: the layers.
        more_devices: added to each type's number.
        like: of the same chain, whose raised table is taken over.
    """

    def __init__(
        self,
        chain: Chain,
        more_devices: Mapping[str, int] | None = None,
        like: TightDivision | None = None,
    ) -> None:
        self._chain = chain
        self._chooser: RecomputeChooser = (
            like._chooser if like else RecomputeChooser(chain, counts_workspace=False)
        )
        self.division = Division(chain, more_devices)
        self._least: dict[tuple[int, int], int] = {} if like is None else like._least
        self._raised: set[tuple[int, int]] = set() if like is None else like._raised
        if like is not None:
            self.division.need_bytes = like.division.need_bytes

    def divide(self) -> TypedStages | None:
        """The fewest stages that fit with one microbatch in flight; None if none are found."""
        for _ in range(MOST_ROUNDS):
            stages = self.division.divide()
            if stages is None or not self._raise_needs(stages):
                return stages
        return None

    def partition(self) -> Partition | None:
        """The same on devices of the cluster."""
        return None if self.divide() is None else self.division.partition()

    def least_overflow(self) -> tuple[float, TypedStages]:
        """How much more every device would need, and the division that would then fit."""
        for _ in range(MOST_ROUNDS):
            found = self._overflow()
            if not self._raise_needs(found[1]):
                return found
        return self._overflow()

    def _overflow(self) -> tuple[float, TypedStages]:
        slack_bytes = self.division.least_slack_bytes()
        stages = self.division.divide(slack_bytes)
        assert stages is not None
        return slack_bytes, stages

    def least_stash_bytes(self, begin: int, end: int) -> int:
        """What layers ``begin`` to ``end`` keep of a microbatch at least."""
        stash = self._chain.stashes.stage(begin, end)
        if not self._chain.problem.job.recompute:
            return stash.fixed_bytes
        if (begin, end) not in self._least:
            self._least[begin, end] = self._search(begin, end, stash.fixed_bytes)
        return self._least[begin, end]

    def _search(self, begin: int, end: int, all_bytes: int) -> int:
        """By halving the room that the stash is given."""
        holding = Holding(begin, end, (self._chain.types[0],))
        low, high = int(self._chain.stashes.least_by_interval()[begin, end]), all_bytes
        room = low
        while low < high:
            found = self._chooser.choose([holding], room)
            if found is not None:
                high = found.stash_bytes
            else:
                low = room + 1
            if high - low <= TOLERANCE * high:
                break
            room = (low + high) // 2
        return high

    def _raise_needs(self, stages: TypedStages) -> bool:
        """Whether a stage needs more than the table said."""
        table, raised = self.division.need_bytes, False
        for begin, end, _ in stages:
            if (begin, end) in self._raised or not self._has_shared_tensors(begin, end):
                continue
            self._raised.add((begin, end))
            need_bytes = self._need_bytes(begin, end)
            raised = raised or need_bytes > table[begin, end]
            table[begin, end] = max(need_bytes, table[begin, end])
        return raised

    def _has_shared_tensors(self, begin: int, end: int) -> bool:
        """Whether the table may be too low: it counts such tensors as kept for nothing."""
        stash = self._chain.stashes.stage(begin, end)
        return self._chain.problem.job.recompute and bool(stash.joint)

    def _need_bytes(self, begin: int, end: int) -> float:
        """Of one microbatch, whatever is recomputed: whole, or as each of the layers runs."""
        chain = self._chain
        workspace = chain.stashes.workspace_bytes(begin, end)
        held = self.division.memory.held_bytes[begin, end] - workspace
        received = chain.stashes.received_by_interval()[begin]
        # While a layer runs: its peak, and what the layers before it keep at least. What it and
        # those behind it save of what is received is theirs.
        running = (
            self.least_stash_bytes(begin, k) - received[k] + received[end] + chain.peak_bytes[k]
            for k in range(begin, end)
        )
        return float(held + max(self.least_stash_bytes(begin, end) + workspace, *running))
