"""Steps of the whole training, of which a pipeline's own steps are shares."""

from __future__ import annotations

from dataclasses import dataclass

from executor.learning_rate import Factor


@dataclass(frozen=True)
class WholeSteps:
    """Steps of the whole training: each is as many shares as there are pipelines.

    Attributes:
        before: that it resumes after.
        pipelines: how many there are.
    """

    before: int
    pipelines: int

    def done_after(self, share: int) -> int:
        """How many are done once all shares up to this one are; shares count from 0."""
        return self.before + (share + 1) // self.pipelines

    def by_share(self, factor: Factor) -> Factor:
        """The rate moves by steps of the whole, where a pipeline counts shares from 1."""
        return lambda share: factor(self.before + (share - 1) // self.pipelines + 1)
