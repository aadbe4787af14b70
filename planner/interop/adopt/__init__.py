"""Plans from stages and schedules that already run, without a search.

``adopt`` assembles the plan, ``division`` finds the layers of each stage, and ``orders`` the
devices and operations. The entry point is :func:`planner.interop.adopt.adopt.adopt`.

``layout`` is a whole layout of another runtime, which ``megatron`` (with ``megatron_arguments``)
and ``torchtitan`` (with ``torchtitan_stages``) read from its own words.
"""
