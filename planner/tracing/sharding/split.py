"""How an exported training step splits over a group of devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from planner.errors import PipeplanError
from planner.model.split_record import SplitParameter
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, tied_nodes
from planner.tracing.sharding.notation import COMBINE
from planner.tracing.sharding.placements import Placements, Share, place, with_summed
from planner.tracing.sharding.positions import with_positions
from planner.tracing.sharding.regions import choose, unsplit_reasons, wanted_classes
from planner.tracing.sharing import operator_name, written_by

_MOVES = PrepareModuleInput | PrepareModuleOutput | SequenceParallel
"""Styles that only say how a module's tensors arrive or leave, which follows from the others."""


@dataclass(frozen=True)
class Split:
    """A step's split.

    Attributes:
        degree: number of ranks; None: whatever some degree divides.
        dimensions: the classes of dimensions behind it.
        regions: what is split.
        placements: forms of every value.
        unsplit: why a parameter with two dimensions or more is not split, by its name.
        parameters: the split parameters, by name.
        summed: names of whole parameters whose gradients are summed over the group once a step.
    """

    degree: int | None
    dimensions: Dimensions
    regions: Sequence[DimensionClass]
    placements: Placements
    unsplit: Mapping[str, str]
    parameters: Mapping[str, SplitParameter]
    summed: frozenset[str]


def split_step(
    exported: ExportedStep,
    layers: LayerAssignment,
    degree: int | None = None,
    *,
    sequence: bool = False,
    experts: bool = False,
    wanted: Mapping[str, int] | None = None,
) -> Split:
    """Find how a step splits: the most work with the least communication.

    Args:
        exported: the step.
        layers: layers of its operations.
        degree: number of devices; None: every split that some degree divides.
        sequence: whether values between regions are shared by positions.
        experts: whether whole experts are given out.
        wanted: dimension of each weight that the user splits, by its name; None: the best.

    Raises:
        PipeplanError: if something wanted cannot be split, or not without something else, or if the
            step writes into a value that it reads again.
    """
    dimensions, tied = Dimensions(exported), tied_nodes(exported)
    _refuse_values_written_again(dimensions)
    candidates: Collection[DimensionClass] = [
        row for row in dimensions.classes if experts or not row.experts
    ]
    if wanted is not None:
        candidates = wanted_classes(exported, dimensions, wanted, degree)
    regions = choose(candidates, degree, is_wanted=wanted is not None)
    known = Placements(
        layers.layer_of,
        nodes_with_gradient(exported),
        {node: region for region in regions for node in region.nodes},
        {n: Share(own, parts) for r in regions for (n, own), parts in r.parts.items()},
    )
    # Rows of experts that go back to shares of tokens are no sums of ranks there.
    made = {n: sequence and operator_name(n) == COMBINE for r in regions for n in r.sums}
    found = place(dimensions, known, made)
    found = with_positions(exported, found, degree) if sequence else found
    found = with_summed(found, tied.values())
    return Split(
        degree,
        dimensions,
        regions,
        found,
        unsplit_reasons(exported, dimensions, regions, degree),
        {name: _parameter(name, n, found) for name, (n, *_) in tied.items() if n in found.shares},
        frozenset(name for name, (node, *_) in tied.items() if node in found.summed),
    )


def _parameter(name: str, node: fx.Node, found: Placements) -> SplitParameter:
    dimension, parts = found.shares[node].place(node)
    return SplitParameter(name=name, dimension=dimension, parts=parts)


def _refuse_values_written_again(dimensions: Dimensions) -> None:
    """Refuse writes into values that are read afterwards: a rank may read another copy."""
    for node in dimensions.data:
        for value in written_by(node) if node.op == "call_function" else ():
            later = [user.name for user in value.users if user is not node and node < user]
            if value in dimensions.data and later:
                raise PipeplanError(
                    f"operation {node.target} writes into {value.name!r}, which {later[0]!r} reads "
                    "afterwards; such a model cannot be split, return a new tensor there"
                )


def wanted_by(plan: Mapping[str, object], model: nn.Module) -> dict[str, int]:
    """Return the dimension of each weight that a plan of ``parallelize_module`` splits, by name.

    ``ColwiseParallel`` and ``RowwiseParallel`` name it. Layouts of inputs and outputs are not read:
    they follow from what is split.

    Args:
        plan: styles by the path of a module, in which ``*`` is any one part.
        model: the model whose modules they name.

    Raises:
        PipeplanError: naming every path without a module and every style that is not known.
    """
    # A tied parameter goes by its first name.
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    problems = []
    for path, style in plan.items():
        modules = _matching(model, path)
        is_known = isinstance(style, ColwiseParallel | RowwiseParallel | _MOVES)
        if not modules:
            problems.append(f"plan: no module {path!r} in {type(model).__name__}; correct the path")
        if not is_known:
            problems.append(
                f"plan: {path!r}: style {type(style).__name__} is not one of ColwiseParallel, "
                "RowwiseParallel and SequenceParallel; leave it out or use one of them"
            )
        for name, module in modules.items() if is_known and not isinstance(style, _MOVES) else ():
            if isinstance(module, nn.Linear | nn.Embedding):
                # A table has its columns in the second dimension, a Linear in the first.
                by_columns = isinstance(style, ColwiseParallel)
                found[first[id(module.weight)]] = int(by_columns != isinstance(module, nn.Linear))
            else:
                problems.append(
                    f"plan: {name!r} is a {type(module).__name__}; only Linear and Embedding are "
                    "split by columns or rows"
                )
    if problems:
        raise PipeplanError(problems)
    return found


def _matching(model: nn.Module, path: str) -> dict[str, nn.Module]:
    patterns = path.split(".")
    return {
        name: module
        for name, module in model.named_modules()
        if len(parts := name.split(".")) == len(patterns) and all(map(fnmatchcase, parts, patterns))
    }
