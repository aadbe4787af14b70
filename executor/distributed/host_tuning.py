"""Network threads of gloo, kept from taking the core of the thread they wait for.

Such a thread polls without pause while another one holds the lock of its connection. Where ranks
have fewer cores than threads it may have just taken the core from that very thread, and then holds
it until the kernel's next tick, 4 ms later: small all-reduces among four ranks on two cores took 4
to 8 ms so, and 1 to 2 ms without.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

THREAD_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")
_NAMED_WITHIN_S = 0.5


def network_threads() -> list[int]:
    """Ids of the threads here that carry gloo's messages; none where the kernel hides them."""
    found = []
    with suppress(OSError):
        for task in _TASKS.iterdir():
            # A thread may end while it is looked at.
            with suppress(OSError):
                if (task / "comm").read_text().strip() == THREAD_NAME:
                    found.append(int(task.name))
    return sorted(found)


def let_others_finish(expected: int = 0) -> None:
    """Wake them without taking a core from a running thread; their share of it stays the same.

    Linux's batch policy does that, and no privilege is needed. To be called when process groups
    have been made; nothing changes on other systems.

    Args:
        expected: how many threads there are at least; one that has just begun may not bear its
            name yet, and is waited for a while.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    until_s = time.monotonic() + _NAMED_WITHIN_S
    while len(threads := network_threads()) < expected and time.monotonic() < until_s:
        time.sleep(0.001)
    for thread in threads:
        # A sandbox may forbid it; then messages are as slow as they were.
        with suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt; the last takes at most 2**25."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, in place of giving it back to the system.

    Every iteration allocates what the one before has freed. Given back, it costs a page fault for
    each page: up to a fifth of the time of convolutions, and as much or as little as glibc's own
    thresholds happen to be. Elsewhere than on Linux with glibc this does nothing.
    """
    _set_malloc({_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**27, _MMAP_THRESHOLD: 2**25})


def return_freed_memory() -> None:
    """Let glibc give what is freed back to the system at once, as long as the model is built.

    By itself it does so with less and less, the larger the tensors that have been freed. Elsewhere
    than on Linux with glibc this does nothing.
    """
    _set_malloc({_MMAP_THRESHOLD: 2**17})


def _set_malloc(values: Mapping[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)
