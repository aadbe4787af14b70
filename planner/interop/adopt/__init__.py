"""Plans from stages and schedules that already run, without a search.

``adopt`` assembles the plan, ``division`` finds the layers of each stage, and ``orders`` the
devices and operations. The entry point is :func:`planner.interop.adopt.adopt.adopt`.
"""
