"""From a torch module to a layer graph: export, group into layers, measure each layer.

Hands out :func:`planner.tracing.trace.trace`; the executor uses ``export`` and ``layers`` so that
it cuts exactly the layers that were planned, ``trace_step`` to profile them, and ``sharing`` for
what they write in place.
"""
