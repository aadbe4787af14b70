"""The search for the fastest plan.

``solve`` has the table of steps and walks it, ``steps`` and ``local_search`` are what they do,
``state`` is what they share, ``budget`` the clock and the table of work units. ``partition`` cuts
the model into stages on devices, ``schedule`` orders the microbatches. ``robust``, ``simple`` and
``data_parallel`` search for special plans, ``feasibility`` explains why there is none.
"""
