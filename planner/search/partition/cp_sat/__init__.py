"""The partition model in CP-SAT, with a proven bound.

``model`` puts it together with the objective, the iteration time's lower bound: the variables are
in ``decisions`` (with the layers of the stages in ``stages``) and ``recomputation``; the
constraints in ``times`` (computation and transfers), ``endings`` (all-reduces and optimizer steps)
and ``memory``. ``tensors`` has the tensors between layers and the units of bytes and ticks.

``search`` enumerates partitions by their bound and checks given ones against a caller's own
constraints; ``optimum`` finds the best partition under such constraints.
"""
