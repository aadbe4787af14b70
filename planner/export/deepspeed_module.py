"""The text of a Python module with a PipelineModule of a plan's partition."""

from __future__ import annotations

from collections.abc import Sequence

_TEXT = '''\
"""A pipeline partition for DeepSpeed, written by `pipeplan export`."""

from deepspeed.pipe import PipelineModule

MODEL = {model}
LAYERS = [{layers}]
"""What each entry of the list of layers is, in its order; the loss is none of them."""
PARTS = {parts}
"""Stage s holds layers PARTS[s] to PARTS[s + 1] - 1."""
RECOMPUTE = frozenset({recompute})
"""Indices of the layers that run again in the backward; ds_config.json switches that on."""


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule with the stages of the plan.

    Args:
        layers: layers or LayerSpecs, one for each of LAYERS.
        options: of PipelineModule, such as loss_fn; not num_stages, topology, partition_method.
    """

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != len(LAYERS):
            raise ValueError(
                f"the plan of {{MODEL!r}} has {{len(LAYERS)}} layers (LAYERS says which), "
                f"got {{len(layers)}}; give one entry for each"
            )
        super().__init__(layers, num_stages=len(PARTS) - 1, **options)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])

    def _is_checkpointable(self, funcs):
        mine = range(self._local_start, self._local_start + len(self.forward_funcs))
        here = {{i for i, func in zip(mine, self.forward_funcs) if any(func is f for f in funcs)}}
        return not RECOMPUTE.isdisjoint(here)
'''


def module_text(
    model: str, layers: Sequence[str], parts: Sequence[int], recompute: Sequence[int]
) -> str:
    """A module that needs DeepSpeed alone.

    Names come from a plan, which anyone may have written: each stands in the text as an escaped
    literal of ASCII, never as code.

    Args:
        model: its name.
        layers: of all stages.
        parts: where each stage begins, and the number of layers.
        recompute: indices of layers.
    """
    rows = "".join(f"\n    {name!a}," for name in layers)
    return _TEXT.format(
        model=ascii(model),
        layers=f"{rows}\n",
        parts=[int(part) for part in parts],
        recompute=[int(index) for index in recompute],
    )
