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

What a layer graph says, and by what rule:

* A layer is a run of operations of one call of a numbered module (``h.3``), or of an outermost
  module without numbered ones inside; the layer graph has no cycle, since runs follow the order of
  execution.
* The work of an operation is one row of :class:`planner.model.figures.Work` a phase: FLOPs by
  torch's own formulas, bytes of every tensor that it reads or writes, and device operations. A
  product's gradients take a product for each operand; those of others take its bytes again.
* The stash is what autograd itself saves; fused attention saves what its kernels do. A weight
  gradient may wait if it is deferrable, and keeps what it needs until then.
* A parameter is trained if the backward from the loss reaches it.
* A split divides dimensions that correspond throughout the step, with the most work and the fewest
  bytes communicated; what cannot be split says why.

=================== ===============================================================
``factory``         imports and builds the model, its batch and its loss
``export``          exports one training step, parts under ``no_grad`` inlined
``layers``          assigns operations to layers
``measure``         work and stash of each operation; ``attention`` recomputed cores
``gradients``       which values take a gradient, and what a split backward defers
``sharing``         memory, writes in place and randomness of operations
``trace``           adds all of it up: the layer graph
``lookups``         what values the entries of a batch may have
``sharding``        splits layers over tensor-parallel groups
``torch_private``   all that is used of torch beyond its public API
=================== ===============================================================
"""
