"""The exact model: stages, device sets, replicas and recomputation in CP-SAT, with a proven bound.

``model`` puts it together from ``decisions`` (layers by ``cuts`` of the chain or by
``graph_stages``), ``times``, ``transfers``, ``tails``, ``memory`` and ``objective``; ``search``
enumerates partitions by their bound, ``optimum`` finds the best one under constraints of one's
own, ``own_constraints`` checks given ones.
"""
