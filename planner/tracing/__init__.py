"""Tracing of a torch module into a layer graph: the only room of the planner that imports torch.

A user gives ``module:factory`` or ``hf:NAME`` and a job. :func:`planner.tracing.trace.trace`
returns the layer graph; :func:`~planner.tracing.trace.trace_step` also returns the exported step,
from which the executor cuts the planned stages. Nothing is allocated: the model is on ``meta``.

The step that is planned trains what eager torch trains, or it is refused by name before anything is
planned. :func:`planner.tracing.eager.observe` calls the forward twice on fake tensors for that, and
:mod:`planner.tracing.check` compares loss and gradients where the model is small enough.

* Kept: autograd Functions (one operator each, :mod:`planner.tracing.functions`), hooks on
  parameters, forward hooks, parts under ``no_grad`` or a disabled autocast, shared blocks (a layer
  a call, ``h.0#2``), tied and frozen parameters, buffers that forward writes.
* Left out with a note: activation checkpoints, since the plan decides what is recomputed.
  ``torch.compile`` is left out, since stages run exported graphs.
* Refused, with what to do instead: hooks of modules and tensors, an enabled autocast, numbers of
  Python's generators, state and tensors in plain attributes, weights that forward writes or
  converts, shapes and branches that depend on data, and parameters whose gradient would be lost.

=================== ===============================================================
``factory``         imports and builds the model, its batch and its loss
``export``          exports one training step; ``regions`` inlines parts of it
``layers``          assigns operations to layers
``measure``         counts FLOPs, traffic and stash; ``attention`` recomputed cores
``gradients``       which values take a gradient, and what a split backward defers
``sharing``         memory, writes in place and randomness of operations
``sharding``        splits layers over tensor-parallel groups
``torch_private``   all that is used of torch beyond its public API
=================== ===============================================================
"""
