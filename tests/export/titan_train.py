"""torchtitan's train entry on the CPU, which it takes for "cuda" where there is no accelerator.

Its trainer gives a schedule microbatches that are divided already (``arg_mbs``), for which torch
2.13.0 has no argument yet: in every pipeline, whatever its options, it asks for a later torch.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torchtitan.tools import utils

for name, value in {
    "get_device_name": lambda _: "CPU",
    "get_device_properties": lambda _: SimpleNamespace(total_memory=2**34),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}.items():
    setattr(torch.cpu, name, value)  # What its monitor of memory asks for.


def step(
    self: PipelineScheduleMulti,
    *,
    arg_mbs: list[Any] | None = None,
    kwarg_mbs: list[Any] | None = None,
    target_mbs: list[Any] | None = None,
    losses: list[Any] | None = None,
    return_outputs: bool = True,
    **options: Any,
) -> None:
    """Run divided microbatches, as later versions of torch do."""
    for stage in self._stages:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **options)


PipelineScheduleMulti.step = step
utils.device_type, utils.device_module = "cpu", torch.cpu
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402

parallel_dims.device_type = "cpu"
distributed.set_pg_timeouts = lambda **_: None  # It waits on devices by number.

from torchtitan.train import main  # noqa: E402

if __name__ == "__main__":
    main()
