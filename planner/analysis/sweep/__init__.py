"""Plans at many points: microbatch sizes and counts, numbers of devices, clusters; ``sweep``.

``points`` are the combinations, ``devices`` the sets of devices that a point chooses among,
``engines`` solve points in this process or on a Ray cluster, and ``run`` is the sweep itself.
"""
