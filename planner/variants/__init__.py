"""Variants of a problem: the only place that changes one.

``problems`` has the functions problem to problem (job, devices, device types), ``clusters`` those
of a cluster, ``microbatches`` those of the microbatch size. ``machine_changes`` are devices lost,
slowed and added, as text, for ``replan``.
"""
