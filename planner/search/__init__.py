"""The search for the fastest plan.

``solve`` has the table of steps and runs them, ``steps`` is what they do, ``incumbent`` what they
have found, ``clock`` the time that is left. ``walk`` changes whole plans, ``orders`` and ``cp_sat``
schedule given stages, ``data_parallel`` searches for plans of equal pipelines; ``infeasible``
explains why there is none.
"""
