"""The stages that will run, one after the other in one process, compared with the model itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from executor.launch.model import Factory
from executor.split.model_split import cut
from executor.stage.runner import StageRunner
from planner.plan.plan import Plan
from planner.tracing.check import Run, compare_with_eager
from planner.tracing.export import ExportedStep
from planner.tracing.factory import Loss
from planner.tracing.layers import assign_layers


def compare_stages(plan: Plan, factory: Factory, own_loss: Loss | None) -> str:
    """Train two small steps by a plan's stages and by the model itself.

    Stages run whole, without tensor-parallel groups, with the plan's recomputation and, where it
    has them, with split backwards.

    Returns:
        One line: what agrees, or why nothing was compared.

    Raises:
        PipeplanError: naming what differs and the remedy.
    """
    splits = any(kind == "I" for order in plan.parsed_orders().values() for _, kind, _ in order)

    def make_run(exported: ExportedStep) -> Run:
        stages = cut(exported, assign_layers(exported), plan, range(len(plan.stages)))
        runners = [StageRunner(stage, 1, split=(0,) if splits else ()) for stage in stages]
        return lambda batch, seed: _run(runners, batch, seed, splits=splits)

    return compare_with_eager(factory, plan.job, plan.model.graph, own_loss, make_run)


def _run(
    runners: list[StageRunner], batch: Mapping[str, Tensor], seed: int, *, splits: bool
) -> Tensor:
    values: tuple[Tensor, ...] = ()
    for runner in runners:
        values = runner.forward(0, values, batch, seed)
    gradients: tuple[Tensor, ...] = ()
    for runner in reversed(runners):
        gradients = runner.backward(0, gradients)
    for runner in runners:
        if splits:
            runner.weight_gradients(0)
        if runner.statistics is not None:
            runner.statistics.apply(runner.statistics.observed())
    return values[0]
