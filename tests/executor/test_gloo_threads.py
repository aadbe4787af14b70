"""gloo's network threads are found under the name they bear, and yield to the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extensive

FORBIDDEN = 77
_SCRIPT = f"""
import os, sys
try:
    for policy in (os.SCHED_BATCH, os.SCHED_OTHER):
        os.sched_setscheduler(0, policy, os.sched_param(0))
except OSError:
    sys.exit({FORBIDDEN})
import torch.distributed as dist
from executor.distributed.host_tuning import network_threads
from executor.sync.shared_parameters import make_process_groups

assert network_threads() == []
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
make_process_groups([(0,)])
threads = network_threads()
assert threads, "gloo's threads have another name now"
policies = set(map(os.sched_getscheduler, threads))
assert policies == set([os.SCHED_BATCH]), policies
assert os.sched_getscheduler(0) == os.SCHED_OTHER
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the batch policy")
def test_network_threads_yield_and_nothing_else_does() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False
    )
    if run.returncode == FORBIDDEN:
        pytest.skip("this sandbox forbids changing how threads are scheduled")
    assert run.returncode == 0, run.stderr
