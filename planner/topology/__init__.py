"""Clusters from measurements: the switches and links that explain measured messages.

Hands out ``message_fit`` (latency and bandwidth of a pair), ``choice`` (the cluster that explains
all pairs, and all-reduces predicted and measured).
"""
