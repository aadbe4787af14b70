"""Variants of a problem: the only place that changes one.

``problems`` has the functions problem to problem (job, devices, device types), ``clusters`` those
of a cluster. ``machine_changes`` are devices lost, slowed and added, as text, for ``replan``.
"""
