"""Stashes that travel to the host: both replays alike, and what the verifier refuses."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, scheduled
from test_agreement import assert_they_agree

from planner.assembly import plan_by_hand


@given(
    scheduled(slowed=True, shards=True),
    st.randoms(use_true_random=False),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_both_replays_copy_stashes_alike(case: Scheduled, rng: random.Random, share: float) -> None:
    pipeline = offloading(case.pipeline, rng, share)
    assert_they_agree(plan_by_hand(pipeline, case.orders))
