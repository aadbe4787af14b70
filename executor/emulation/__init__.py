"""Emulated devices: operations that take the time of another machine."""
