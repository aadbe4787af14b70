"""Partitions along an order of the devices, and a search over orders."""
