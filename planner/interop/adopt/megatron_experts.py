"""Expert parallelism in the arguments of Megatron-LM.

As of Megatron-LM d98e8a6, ``megatron/core/parallel_state.py``: an expert-parallel group has ranks
that follow each other, those of tensor-parallel groups first if the experts' own tensor degree,
``--expert-tensor-parallel-size``, is 1; by default it is that of all layers.
"""

from __future__ import annotations

from planner.errors import shorten
from planner.interop.adopt.megatron_arguments import MegatronArguments

_SIZE, _TENSOR = "expert-model-parallel-size", "expert-tensor-parallel-size"
_DISPATCHER, _CAPACITY = "moe-token-dispatcher-type", "moe-expert-capacity-factor"


def has_whole_experts(found: MegatronArguments, degree: int) -> bool:
    """Return whether the devices of a tensor-parallel group have whole experts.

    Args:
        found: the arguments, which note what plans cannot express.
        degree: devices of the group.
    """
    experts, tensor = found.number(_SIZE) or 1, found.number(_TENSOR) or degree
    if experts == 1:
        if tensor != degree:
            found.wrong(
                _TENSOR,
                f"{tensor}: experts in other shares than the rest are not planned; set it to "
                f"{degree}, or to 1 with --{_SIZE} {degree}",
            )
        return False
    if (experts, tensor) != (degree, 1):
        found.wrong(
            _SIZE,
            f"{experts} with --{_TENSOR} {tensor}: plans give whole experts to the devices of a "
            f"tensor-parallel group, {degree} here; set --{_SIZE} and --tensor-model-parallel-size "
            f"to one number and --{_TENSOR} to 1, or --{_SIZE} to 1",
        )
    if not found.has("sequence-parallel"):
        found.wrong(
            _SIZE, "Megatron-LM takes it beside tensor parallelism with --sequence-parallel; add it"
        )
    dispatcher = found.word(_DISPATCHER)
    if dispatcher != "alltoall":
        found.wrong(
            _DISPATCHER,
            f"{shorten(dispatcher or 'allgather, the default')}: rows go to experts by all-to-all "
            "in plans; set it to alltoall",
        )
    if found.has(_CAPACITY):
        found.wrong(_CAPACITY, "plans drop no tokens; leave it out")
    return True
