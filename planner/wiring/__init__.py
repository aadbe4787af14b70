"""Clusters from what was measured on their links: which switches and links explain it.

Hands out ``message_fit`` (latency and bandwidth of a pair), ``choice.choose_wiring`` (the cluster
that explains all pairs), ``reductions`` (all-reduces predicted and measured) and ``device_types``
(presets by the names of GPUs).
"""
