"""Ranks that do one thing together: all of them learn of it when one fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import PipeplanError


@dataclass(frozen=True)
class Ranks:
    """The ranks that write a checkpoint together, as one of them sees it.

    Attributes:
        rank: this one.
        gather: hands every rank the texts of all, in the order of the ranks; it is a barrier too.
    """

    rank: int
    gather: Callable[[str], Sequence[str]]

    @classmethod
    def alone(cls) -> Ranks:
        """One process."""
        return cls(0, lambda text: [text])

    @classmethod
    def of_process_group(cls, group: Any = None) -> Ranks:
        """The ranks of an initialised process group, default the whole world."""
        import torch.distributed as dist

        from executor.distributed.failure import talking_to

        def gather(text: str) -> Sequence[str]:
            texts: list[Any] = [None] * dist.get_world_size(group)
            with talking_to("the other ranks, to do something together"):
                dist.all_gather_object(texts, text, group=group)
            return texts

        return cls(dist.get_rank(group), gather)

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; nobody goes on before all are done.

        Args:
            action: what this rank does; returns a JSON value.

        Returns:
            What the ranks' actions returned.

        Raises:
            PipeplanError: on every rank, if the action failed on any; it names those.
        """
        cause: Exception | None = None
        try:
            outcome = {"done": action()}
        except Exception as error:
            cause = error
            outcome = {"failed": list(_problems(error))}
        outcomes = [json.loads(text) for text in self.gather(json.dumps(outcome))]
        failures = [
            problem if len(outcomes) == 1 else f"rank {rank}: {problem}"
            for rank, found in enumerate(outcomes)
            for problem in found.get("failed", ())
        ]
        if failures:
            raise PipeplanError(failures) from cause
        return [found["done"] for found in outcomes]

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0; every rank gets what it returned, or its error."""
        return self.together(lambda: action() if self.rank == 0 else None)[0]


def _problems(error: Exception) -> Sequence[str]:
    if isinstance(error, PipeplanError):
        return error.problems
    return [f"{type(error).__name__}: {error}"]
