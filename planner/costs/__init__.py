"""Seconds and bytes of layers, boundaries and collectives on given devices."""
