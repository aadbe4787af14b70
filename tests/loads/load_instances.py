"""Small random placement problems."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.placement.solver.instance import DeviceClass, LoadInstance, LoadNode

TIMES = st.sampled_from([0.25, 1.0, 2.0, 3.5, 5.0]) | st.floats(0.125, 8.0)
COSTS = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 4.0)


@st.composite
def load_instances(draw: st.DrawFn, most_nodes: int = 6) -> LoadInstance:
    """Colours, backward nodes with and without a forward one, CPUs, memory and forbidden classes.

    All nodes take time, so the authors' rule for those that take none changes nothing.
    """
    count = draw(st.integers(1, most_nodes))
    forward = draw(st.integers(1, count))
    accelerators = draw(st.integers(0, 3))
    cpus = draw(st.integers(0 if accelerators else 1, 2 if accelerators < 2 else 1))
    return LoadInstance(
        name="random",
        classes=(
            DeviceClass("accelerator", accelerators, draw(st.sampled_from([3.0, 6.0, None])), True),
            DeviceClass("cpu", cpus, None, False),
        ),
        nodes=tuple(draw(_node(index, index >= forward)) for index in range(count)),
        edges=tuple(
            (10 * source, 10 * target)
            for source in range(count)
            for target in range(source + 1, count)
            if draw(st.integers(0, 2)) == 0
        ),
    )


@st.composite
def _node(draw: st.DrawFn, index: int, is_backward: bool) -> LoadNode:
    time = draw(TIMES)
    return LoadNode(
        id=10 * index,
        times=(time, time * draw(st.sampled_from([0.5, 2.0, 10.0]))),
        allowed=(draw(st.integers(0, 7)) > 0, True),
        memory_bytes=float(draw(st.integers(0, 3))),
        transfer_time=draw(COSTS),
        color=draw(st.none() | st.integers(0, 3)),
        is_backward=is_backward,
    )


def chain(
    times: list[float], *, accelerators: int = 2, cpus: int = 0, transfer_time: float = 0.5
) -> LoadInstance:
    """Nodes 0, 1, 2, … that each use the one before; a CPU takes ten times as long."""
    return LoadInstance(
        name="chain",
        classes=(
            DeviceClass("accelerator", accelerators, None, True),
            DeviceClass("cpu", cpus, None, False),
        ),
        nodes=tuple(
            LoadNode(index, (time, 10 * time), (True, True), transfer_time=transfer_time)
            for index, time in enumerate(times)
        ),
        edges=tuple((index, index + 1) for index in range(len(times) - 1)),
    )
