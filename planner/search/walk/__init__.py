"""The walk over whole plans: starts, random changes judged by replays, and the best layouts found.

``WalkSearch`` searches; ``Clock`` limits it by time or by work; it finds ``Layout``s.
"""
