"""Variants of a problem: the only place that changes one.

``problems`` has the functions problem to problem (job, devices, device types, links), ``clusters``
those of a cluster, ``microbatches`` those of the microbatch size. ``changes`` and
``machine_changes`` are changes as text, for ``what-if`` and ``replan``.
"""
