"""The user's own split: a plan of ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from planner.errors import PipeplanError

_MOVES = (PrepareModuleInput, PrepareModuleOutput)
"""Styles that only say how a module's tensors arrive or leave, which follows from the others."""


@dataclass(frozen=True)
class Wanted:
    """What a plan splits.

    Attributes:
        dimensions: dimension of each weight, by its name; other weights are not split.
        sequence: whether it shares positions between regions.
    """

    dimensions: Mapping[str, int]
    sequence: bool


def wanted_by(plan: Mapping[str, object], model: nn.Module) -> Wanted:
    """Read a plan: paths of modules, in which ``*`` is any one part, with their styles.

    ``ColwiseParallel`` and ``RowwiseParallel`` say which dimension of a weight is split, and any
    ``SequenceParallel`` that positions are shared. Layouts of inputs and outputs are not read: they
    follow from what is split.

    Args:
        plan: styles by path.
        model: the model whose modules they name.

    Raises:
        PipeplanError: naming every path without a module and every style that is not known.
    """
    dimensions: dict[str, int] = {}
    problems: list[str] = []
    sequence = False
    for path, style in plan.items():
        found = [(n, m) for n, m in model.named_modules() if _matches(n, path)]
        if not found:
            problems.append(f"plan: no module {path!r} in {type(model).__name__}; correct the path")
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            problems += _read(found, isinstance(style, ColwiseParallel), dimensions)
        elif isinstance(style, SequenceParallel):
            sequence = True
        elif not isinstance(style, _MOVES):
            problems.append(
                f"plan: {path!r}: style {type(style).__name__} is not one of ColwiseParallel, "
                "RowwiseParallel and SequenceParallel; leave it out or use one of them"
            )
    if problems:
        raise PipeplanError(problems)
    return Wanted(_one_name_each(model, dimensions), sequence)


def _matches(name: str, path: str) -> bool:
    parts, patterns = name.split("."), path.split(".")
    pairs = zip(parts, patterns, strict=False)
    return len(parts) == len(patterns) and all(fnmatchcase(part, like) for part, like in pairs)


def _read(
    modules: Iterable[tuple[str, nn.Module]], by_columns: bool, dimensions: dict[str, int]
) -> list[str]:
    """Add the split dimension of each module's weight; return what is wrong."""
    problems = []
    for name, module in modules:
        if isinstance(module, nn.Linear):
            dimensions[f"{name}.weight"] = 0 if by_columns else 1
        elif isinstance(module, nn.Embedding):
            dimensions[f"{name}.weight"] = 1 if by_columns else 0
        else:
            problems.append(
                f"plan: {name!r} is a {type(module).__name__}; only Linear and Embedding are split "
                "by columns or rows"
            )
    return problems


def _one_name_each(model: nn.Module, dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions by the first name of each parameter, which may be tied."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {first[id(model.get_parameter(name))]: own for name, own in dimensions.items()}
