"""The exact model: boundaries, device sets and replica counts in CP-SAT, with a proven bound.

``model`` puts it together from ``decisions``, ``times``, ``transfers``, ``tails`` and
``objective``; ``search`` enumerates partitions by their bound.
"""
