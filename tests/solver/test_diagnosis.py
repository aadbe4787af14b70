"""What is said when nothing fits: the cause with its figures, and remedies that do help."""

import re
from dataclasses import replace

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner import Cluster, InfeasibleError, Job, Problem, solve

GIB = 2**30
MIB = 2**20


def problem(
    memory_gib: float,
    *,
    devices: int = 2,
    weights_mib: int = 64,
    stash_mib: int = 100,
    joined: bool = True,
    **job: object,
) -> Problem:
    """Four equal layers; weights are as many MiB each, a stash and a cut of 10 MiB.

    Temporaries of 20 MiB stand beside the stash of a layer that runs.
    """
    sizes = {"stash_bytes": (stash_mib + 10) * MIB, "peak_bytes": (stash_mib + 30) * MIB}
    rows = [layer(name, parameters=[f"p{name}"], **sizes) for name in "abcd"]
    cuts = [boundary(u, v, bytes_=10 * MIB, saved_by=v) for u, v in zip("abc", "bcd", strict=True)]
    parameters = [parameter(f"p{name}", weights_mib * MIB // 4) for name in "abcd"]
    names = [f"d{i}" for i in range(devices)]
    links = [link(name, "hub", 10) for name in names] if joined else []
    machines = cluster(names, links, ["hub"], {"unit": device_type(memory_gib=memory_gib)})
    samples = int(job.pop("samples_per_microbatch", 1))
    the_graph = graph(rows, cuts, parameters, samples_per_microbatch=samples)
    settings = {"microbatches": 4, "samples_per_microbatch": samples, **job}
    return Problem(the_graph, machines, Job.model_validate(settings))


def diagnosis(of: Problem) -> str:
    with pytest.raises(InfeasibleError) as caught:
        solve(of, time_limit_s=0.3, deterministic=True)
    return str(caught.value)


def sizes_mib(text: str) -> list[float]:
    scale = {"GiB": 1024.0, "MiB": 1.0, "KiB": 1 / 1024}
    return [float(n) * scale[unit] for n, unit in re.findall(r"([\d.]+) (GiB|MiB|KiB)", text)]


def test_a_layer_larger_than_any_device_is_named_with_what_it_holds() -> None:
    """Weights, gradients and two moments: 256 MiB; its input 10, as it runs 120, neighbours 20."""
    said = diagnosis(problem(0.34375))
    assert "no plan fits: layer 'b' alone needs 406 MiB" in said
    need, *parts, have, missing = sizes_mib(said.split(";")[0])
    assert need == pytest.approx(sum(parts))
    assert (have, missing) == (352, 54)
    assert "optimizer state 128 MiB" in said
    assert "workspace 120 MiB" in said


def test_state_larger_than_all_devices_is_said_with_the_missing_devices() -> None:
    """Two layers need 512 MiB and more of state; a device takes one."""
    said = diagnosis(problem(0.4))
    assert "weights, gradients and optimizer state need 1 GiB in all, 2 devices have" in said
    assert "in the best division into 2 stages layers" in said
    assert "2 more devices of type 'unit'" in said
    assert solve(problem(0.4, devices=4), time_limit_s=0.3, deterministic=True)


def test_too_few_stages_are_said_with_the_number_that_fits() -> None:
    of = problem(0.4, devices=4, max_stages=2)
    said = diagnosis(of)
    assert "job.max_stages = 2" in said
    assert "max_stages = 4" in said
    more = replace(of, job=of.job.model_copy(update={"max_stages": 4}))
    assert len(solve(more, time_limit_s=0.3, deterministic=True).plan.stages) == 4


def test_recomputation_is_named_where_it_helps() -> None:
    """Two layers: 220 MiB, or a tenth of it with 110 MiB of the one that runs again."""
    of = problem(0.7, recompute=False)
    said = diagnosis(of)
    assert "stash of one microbatch 220 MiB" in said
    assert "what would help: recompute = true" in said
    allowed = replace(of, job=of.job.model_copy(update={"recompute": True}))
    assert solve(allowed, time_limit_s=0.3, deterministic=True)


def test_a_lighter_optimizer_is_named_where_it_helps() -> None:
    """Without one moment a layer needs 64 MiB less: 406 - 64 = 342."""
    of = problem(0.35, devices=4)
    said = diagnosis(of)
    assert 'what would help: optimizer = "sgd_momentum"' in said
    lighter = replace(of, job=of.job.model_copy(update={"optimizer": "sgd_momentum"}))
    assert solve(lighter, time_limit_s=0.3, deterministic=True)


def test_a_smaller_microbatch_is_named_where_it_helps() -> None:
    """Half the activations, but all of a new gradient: 256 + 5 + 92 + 10 MiB."""
    said = diagnosis(problem(0.37, devices=4, samples_per_microbatch=8))
    assert "samples_per_microbatch = 4" in said
    assert "samples_per_microbatch = 4" not in diagnosis(
        problem(0.35, devices=4, samples_per_microbatch=8)
    )


def test_settings_that_only_help_together_are_named_together() -> None:
    of = problem(0.45, recompute=False)
    said = diagnosis(of)
    assert 'recompute = true with optimizer = "sgd"' in said
    settings = {"recompute": True, "optimizer": "sgd"}
    assert solve(
        replace(of, job=of.job.model_copy(update=settings)), time_limit_s=0.3, deterministic=True
    )


@pytest.mark.parametrize("memory_gib", [0.1, 0.25, 0.4])
def test_the_memory_that_is_named_is_enough_and_little_less_is_not(memory_gib: float) -> None:
    said = diagnosis(problem(memory_gib))
    found = re.search(r"memory_gib = ([\d.]+)", said)
    assert found is not None
    assert solve(problem(float(found[1])), time_limit_s=0.3, deterministic=True)
    diagnosis(problem(0.98 * float(found[1])))


def test_memory_that_all_devices_lack_is_named_as_such() -> None:
    """Two layers each: one larger device would have to hold three."""
    of = problem(0.4)

    def machines(more_gib: float) -> Cluster:
        sizes = {"small": 0.3 + more_gib, "large": 0.31 + more_gib}
        kinds = {name: device_type(memory_gib=size) for name, size in sizes.items()}
        return cluster({"d0": "small", "d1": "large"}, [link("d0", "d1", 10)], types=kinds)

    said = diagnosis(replace(of, cluster=machines(0)))
    found = re.search(r"([\d.]+) GiB more on every device", said)
    assert found is not None
    enough = replace(of, cluster=machines(float(found[1])))
    assert solve(enough, time_limit_s=0.3, deterministic=True)
    diagnosis(replace(of, cluster=machines(float(found[1]) - 0.02)))


def test_devices_that_nothing_joins_are_named_where_memory_would_do() -> None:
    said = diagnosis(problem(0.4, devices=4, joined=False))
    assert "no path of links and switches joins 'd0' and 'd1'" in said


def skip_problem(memory_mib: float, **job: object) -> Problem:
    """Three layers of 64 MiB of state; the first one's output of 10 MiB is used by both others.

    With all recomputed, one device holds 192 MiB of state, the two tensors of 10 MiB from which
    layers start again, and 120 as one of them runs, less the 10 among it: 322 MiB.
    """
    sizes = {"stash_bytes": 100 * MIB, "peak_bytes": 120 * MIB}
    rows = [layer(name, parameters=[f"p{name}"], **sizes) for name in "abc"]
    cuts = [
        boundary("a", "b", "c", bytes_=10 * MIB),
        boundary("b", "c", bytes_=10 * MIB, saved_by="c"),
    ]
    parameters = [parameter(f"p{name}", 4 * MIB) for name in "abc"]
    kinds = {"unit": device_type(memory_gib=memory_mib / 1024)}
    machines = cluster(["d0"], [], types=kinds)
    return Problem(graph(rows, cuts, parameters), machines, Job.model_validate(job))


def test_a_tensor_that_several_layers_start_again_from_is_counted() -> None:
    said = diagnosis(skip_problem(315))
    assert "layers 'a' to 'c' need 322 MiB" in said
    assert "the device 'd0' has 315 MiB: 7 MiB too little" in said
    assert 'optimizer = "sgd_momentum"' in said
    assert solve(skip_problem(315, optimizer="sgd_momentum"), time_limit_s=0.3, deterministic=True)
    assert solve(skip_problem(322.1), time_limit_s=0.3, deterministic=True)


def test_devices_that_only_join_through_others_are_named() -> None:
    """Devices do not forward: d1 and d2 each reach d0, not each other."""
    links = [link("d0", "d1", 10), link("d0", "d2", 10)]
    kinds = {"unit": device_type(memory_gib=0.41)}
    machines = cluster(["d0", "d1", "d2", "d3"], [*links, link("d0", "d3", 10)], types=kinds)
    said = diagnosis(replace(problem(0.41, devices=4), cluster=machines))
    assert "no path of links and switches joins 'd1' and 'd2'" in said


def test_layers_bound_to_other_devices_are_said_where_memory_would_do() -> None:
    """The types take turns three times, and there are two devices."""
    rows = [
        layer(name, stash_bytes=MIB, device_types=[kind])
        for name, kind in zip("abc", ("red", "blue", "red"), strict=True)
    ]
    kinds = {"red": device_type(), "blue": device_type()}
    machines = cluster({"d0": "red", "d1": "blue"}, [link("d0", "d1", 10)], types=kinds)
    said = diagnosis(Problem(graph(rows), machines, Job()))
    assert "layer 'a' runs on red only, 3 of 3 layers bound so" in said
