"""Models of the zoo with some of their parameters frozen, for plans that executors are tried on."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from models import ZOO
from planner.tracing.factory import import_factory


def partly_frozen(name: str, frozen: Sequence[int], **arguments: Any) -> nn.Module:
    """A model of the zoo that trains some of its parameters only.

    Args:
        name: in :data:`models.ZOO`.
        frozen: the numbers, in the order of ``model.parameters()``, of those that stay as they are.
        **arguments: of the factory.
    """
    model = import_factory(ZOO[name])(**arguments)
    parameters = list(model.parameters())
    for number in frozen:
        parameters[number].requires_grad_(False)
    return model
