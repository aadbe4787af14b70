"""Attributes of graphs that nobody may edit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

import networkx as nx


class Attributes(dict[str, Any]):
    """A dictionary that is filled once, by its first ``update``, and is then read-only.

    A copy is an ordinary dictionary; what a shallow copy shares stays read-only.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Fill an empty one.

        Raises:
            networkx.NetworkXError: if it is filled.
        """
        if self:
            self._refuse()
        super().update(*args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise nx.NetworkXError(
            "the attributes of a layer graph are read-only: solvers read its record; make another "
            "with LayerGraph.from_record, or edit an ordinary nx.DiGraph(graph)"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = setdefault = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def read_only(values: dict[str, Any]) -> dict[str, Any]:
    """The same, read-only."""
    attributes = Attributes()
    attributes.update(values)
    return attributes
