"""Dynamic programs over chains of layers.

``core`` asks which limit on the iteration time some stages can keep, for any state space;
``order_program`` is such a space for stages along an order of the devices, with ``order_stages`` as
its costs and ``device_orders`` as orders to start from. ``min_max`` minimises the bottleneck for
every number of stages instead. The relaxations have further state spaces.
"""
