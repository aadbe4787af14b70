"""Tracing of a torch module into a layer graph: export, grouping into layers, measuring.

Hands out :func:`planner.tracing.trace.trace`. The executor uses ``export`` and ``layers`` to
cut exactly the planned layers, ``trace_step`` to profile them, and ``sharing`` for their writes in
place.
"""
