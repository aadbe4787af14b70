"""A layout: what a search decides of a plan, and nothing else.

Stages are intervals of the chain of layers; devices have their numbers in the problem's cluster,
where tensor-parallel groups are devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from planner.costs.placed_pipeline import StageSpec
from planner.costs.stage_table import StageTable
from planner.errors import PipeplanError
from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan, Stage
from planner.program.program import KINDS
from planner.program.schedule import operation_code

Codes = tuple[int, ...]
"""Operations as (stage * 4 + kind) * M + microbatch; kinds are numbered as their letters sort."""


@dataclass(frozen=True)
class Layout:
    """Stages with their devices, what they keep in memory, and the order of each device.

    Attributes:
        ends: of each stage, the layer behind its last.
        devices: of each stage, the numbers of its devices.
        limits: of each stage, on the layers that it recomputes and on those that it offloads
            (:mod:`planner.costs.stage_table`).
        orders: the operations of each device in use, by its number.
        microbatches: of an iteration.
    """

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    limits: tuple[tuple[int, int], ...]
    orders: Mapping[int, Codes]
    microbatches: int

    @classmethod
    def of(cls, plan: Plan, table: StageTable) -> Layout:
        """Return the layout of a plan.

        Args:
            plan: of the table's problem; its stages name groups where that has groups.
            table: of the problem.

        Raises:
            PipeplanError: if a stage is no interval of layers, or recomputes or offloads other
                layers than a limit gives.
        """
        numbers = table.problem.cluster.numbers
        ends = _ends_of(plan, table)
        orders = {
            numbers[name]: tuple(operation_code(row, plan.microbatches) for row in order)
            for name, order in plan.parsed_orders().items()
        }
        return cls(
            ends=ends,
            devices=tuple(tuple(numbers[d] for d in stage.devices) for stage in plan.stages),
            limits=tuple(
                _limits_of(table, *row)
                for row in zip(pairwise((0, *ends)), plan.stages, strict=True)
            ),
            orders=orders,
            microbatches=plan.microbatches,
        )

    def specs(self, table: StageTable) -> Iterator[StageSpec]:
        """Yield the stages by the names of their layers and devices."""
        names = table.problem.cluster.device_names
        for (first, last), devices, (rerun, offload) in zip(
            pairwise((0, *self.ends)), self.devices, self.limits, strict=True
        ):
            yield StageSpec(
                table.layers[first:last],
                tuple(names[device] for device in devices),
                table.recomputed(first, last, rerun),
                table.offloaded(first, last, rerun, offload),
            )

    def operations(self, table: StageTable) -> Orders:
        """Return the operations of each device by its name."""
        names = table.problem.cluster.device_names
        return {names[d]: tuple(map(self._operation, codes)) for d, codes in self.orders.items()}

    def _operation(self, code: int) -> Operation:
        what, microbatch = divmod(code, self.microbatches)
        return Operation(what // 4, KINDS[what % 4], microbatch)  # type: ignore[arg-type]


def _ends_of(plan: Plan, table: StageTable) -> tuple[int, ...]:
    end, ends = 0, []
    for stage in plan.stages:
        last = end + len(stage.layers)
        if stage.layers != table.layers[end:last]:
            raise PipeplanError(
                f"stages[{stage.index}].layers: {stage.layers[0]!r} to {stage.layers[-1]!r} are no "
                f"interval of the model's layers that begins at {table.layers[end]!r}; searches "
                "take plans whose stages cut the chain of layers"
            )
        end = last
        ends.append(end)
    return tuple(ends)


def _limits_of(table: StageTable, layers: tuple[int, int], stage: Stage) -> tuple[int, int]:
    """Return the limits with which a stage recomputes and offloads what it does."""
    most = range(len(table.layers) + 1)
    rerun = next((n for n in most if table.recomputed(*layers, n) == stage.recompute), None)
    if rerun is not None:
        offloaded = (n for n in most if table.offloaded(*layers, rerun, n) == stage.offload)
        offload = next(offloaded, None)
        if offload is not None:
            return rerun, offload
    raise PipeplanError(
        f"stages[{stage.index}]: it recomputes or offloads layers in another order than that of "
        "the bytes that they free a second, which searches do not; take such layers out, or keep "
        "all stashes"
    )
