"""The cluster: devices, switches and links, routes through them, and presets of common hardware."""
