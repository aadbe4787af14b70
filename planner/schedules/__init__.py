"""Published schedules as rules of order, by name, and the fastest one for stages on devices.

A rule takes stages on their devices and the replica that runs each (stage, microbatch), and returns
the order of operations of each device. ``published`` has the rules by name: those with whole
backwards are in ``whole`` and ``pe``, those with split backwards in ``split`` and ``zero_bubble``.
``assignment`` gives microbatches to replicas, ``pipelines`` has every one of several equal
pipelines run a rule, ``listed`` schedules greedily within memory, and ``best`` compares all of
them in the simulator.
"""
