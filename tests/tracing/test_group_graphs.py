"""Layers of traced models as a tensor-parallel group runs them, against published formulas."""

from functools import cache

import pytest
from traces import in_groups

from planner import Job, Problem
from planner.tracing.trace import TracedStep, trace_step

WIDTH, SEQUENCE, SAMPLES = 512, 32, 3
SIZES = {"layers": 1, "width": WIDTH, "heads": 8, "sequence_length": SEQUENCE, "vocabulary": 96}


@cache
def traced() -> TracedStep:
    return trace_step("models.gpt:gpt_tiny", job(1))


def job(degree: int, *, sequence: bool = False) -> Job:
    return Job(
        samples_per_microbatch=SAMPLES,
        model_arguments=dict(SIZES),
        tensor_parallel=degree,
        sequence_parallel=sequence,
    )


def grouped(degree: int, *, sequence: bool = False) -> Problem:
    return in_groups(traced(), job(degree, sequence=sequence))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_member_of_a_group_keeps_what_korthikanti_et_al_say(degree: int) -> None:
    """Table 2 of "Reducing activation recomputation" (2022), in units of sbh elements.

    Without dropout masks and with fused attention, which keeps no scores: a block keeps 16, of
    which norms (2) and the inputs of attention and MLP (2) are whole on every member, unless they
    share positions.
    """
    unit = 4 * SEQUENCE * SAMPLES * WIDTH
    whole = traced().graph.layers[3].stash_bytes
    for sequence, expected in ((False, 4 + 12 / degree), (True, 16 / degree)):
        block = grouped(degree, sequence=sequence).graph.layers["h.0"]
        assert whole / unit == pytest.approx(16, rel=0.01)
        assert block.stash_bytes / degree / unit == pytest.approx(expected, rel=0.01)


def test_work_is_shared_and_what_is_not_is_done_by_every_member() -> None:
    one, two = traced().graph.layers, grouped(2).graph.layers
    for layer in one:
        together = two[layer.name]
        # All products split; norms and what follows rows do not.
        assert together.flops == layer.flops
        assert len(together.work) == len(layer.work)
        assert [row.operations for row in together.work] == [row.operations for row in layer.work]
    block, shared = one[3], two["h.0"]
    assert block.forward_traffic_bytes < shared.forward_traffic_bytes
    assert shared.forward_traffic_bytes < 2 * block.forward_traffic_bytes


def test_parameters_are_split_or_held_by_every_member() -> None:
    record = traced().graph
    one = {row.name: row for row in record.parameters}
    two = grouped(2, sequence=True).graph.parameters
    copies = {name: two[name].bytes // row.bytes for name, row in one.items()}
    whole = {name for name, count in copies.items() if count == 2}
    norms = {f"{n}.{p}" for n in ("h.0.ln_1", "h.0.ln_2", "ln_f") for p in ("weight", "bias")}
    rows = {"h.0.attn.c_proj.bias", "h.0.mlp.c_proj.bias"}
    assert whole == {*norms, *rows, "wpe.weight"}
    # Each member has gradients of its own positions alone.
    assert {name for name, row in two.items() if row.summed} <= whole
    assert norms <= {name for name, row in two.items() if row.summed}
