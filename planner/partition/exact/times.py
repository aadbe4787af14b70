"""How long the stages compute: by device type, and shared among replicas."""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.partition.exact.decisions import Decisions
from planner.partition.exact.layer_stages import Expression
from planner.partition.exact.recomputation import Recomputation


class StageTimes:
    """Compute times in ticks.

    Attributes:
        uses_type: ``uses_type[j, k]``: some replica of stage j is of device type k.
        forward, backward: ``forward[k][j]``: one microbatch of stage j on type k.
        least_forward, least_backward: per stage, one microbatch on its fastest replica.
        load: per stage, the work of its most loaded replica if the microbatches are split best.
    """

    def __init__(self, decisions: Decisions, recomputation: Recomputation | None) -> None:
        self._d = decisions
        self._model = decisions.model
        chain = decisions.chain
        self._kinds = range(len(chain.types))
        ticks = decisions.ticks
        self.forward = [decisions.sums(ticks(chain.forward_s(t))) for t in chain.types]
        self.backward = [decisions.sums(ticks(chain.backward_s(t))) for t in chain.types]
        if recomputation is not None:
            for k, name in enumerate(chain.types):
                again = recomputation.sums(ticks(chain.forward_s(name)))
                for j in decisions.stages:
                    self.backward[k][j] += again[j]
        self.uses_type = {
            (j, k): self._uses_type(j, k) for j in decisions.stages for k in self._kinds
        }
        self._keep_rules()
        self.least_forward = [self._least(self.forward, j) for j in decisions.stages]
        self.least_backward = [self._least(self.backward, j) for j in decisions.stages]
        self.load = [decisions.time(f"load {j}") for j in decisions.stages]
        for j in decisions.stages:
            if decisions.job.replication:
                self._split_microbatches(j)
            else:
                self._load_single_device(j)

    def _uses_type(self, j: int, k: int) -> cp_model.IntVar:
        literal = self._model.new_bool_var(f"stage {j} uses type {k}")
        self._model.add_max_equality(literal, self._d.holders(j, k))
        return literal

    def _keep_rules(self) -> None:
        """No layer in a stage with a device of a type that it may not run on."""
        for k, name in enumerate(self._d.chain.types):
            foreign = [int(x) for x in self._d.chain.foreign_layers(name)]
            if any(foreign):
                for j, inside in enumerate(self._d.sums(foreign)):
                    self._model.add(inside == 0).only_enforce_if(self.uses_type[j, k])

    def _least(self, table: list[list[Expression]], j: int) -> Expression:
        """The smallest over the device types a stage uses."""
        if len(table) == 1:
            return table[0][j]
        value = self._d.time()
        picks = [self._model.new_bool_var("") for _ in table]
        self._model.add(sum(picks) == 1).only_enforce_if(self._d.active[j])
        for k, pick in enumerate(picks):
            self._model.add_implication(pick, self.uses_type[j, k])
            self._model.add(value >= table[k][j]).only_enforce_if(pick)
        return value

    def _load_single_device(self, j: int) -> None:
        for k in self._kinds:
            work = self._d.job.microbatches * (self.forward[k][j] + self.backward[k][j])
            self._model.add(self.load[j] >= work).only_enforce_if(self.uses_type[j, k])

    def _split_microbatches(self, j: int) -> None:
        """Replicas of one type take at most ``most`` microbatches each; together they take all."""
        count = self._d.job.microbatches
        taken = []
        for k in self._kinds:
            members = self._d.holders(j, k)
            works = self._model.new_bool_var(f"type {k} works at {j}")
            self._model.add_implication(works, self.uses_type[j, k])
            most = self._model.new_int_var(0, count, f"most {j} {k}")
            self._model.add(most == 0).only_enforce_if(~works)
            replicas = self._model.new_int_var(0, len(members), "")
            self._model.add(replicas == sum(members))
            product = self._model.new_int_var(0, count * len(members), "")
            self._model.add_multiplication_equality(product, [replicas, most])
            taken.append(product)
            each, work = self._d.time(), self._d.time()
            # A replica too slow for a single microbatch may still be there, without any.
            self._model.add(each >= self.forward[k][j] + self.backward[k][j]).only_enforce_if(works)
            self._model.add_multiplication_equality(work, [most, each])
            self._model.add(self.load[j] >= work)
        self._model.add(sum(taken) >= count).only_enforce_if(self._d.active[j])
