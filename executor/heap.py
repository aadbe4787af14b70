"""The process's heap while a CPU trains."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's mallopt."""
_LARGEST_MMAP_THRESHOLD = 2**25
"""That glibc takes."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, in place of giving it back to the system.

    Every iteration allocates what the one before has freed. Given back, it costs a page fault for
    each page: up to a fifth of the time of convolutions, and as much or as little as glibc's own
    thresholds happen to be. Elsewhere than on Linux with glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 2**27)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
