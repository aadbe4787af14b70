"""Tiny files of the importable formats."""

from typing import Any


def _node(number: int, seconds: float) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"node{number}",
        "supportedOnFpga": 1,
        "cpuLatency": 1000.0,
        "fpgaLatency": seconds,
        "isBackwardNode": 0,
        "colorClass": number,
        "size": 0.0,
    }


PLACEMENT = {
    "maxSizePerFPGA": 1e9,
    "maxFPGAs": 2,
    "maxCPUs": 0,
    "nodes": [_node(1, 2.0), _node(2, 3.0), _node(3, 4.0)],
    "edges": [
        {"sourceId": 1, "destId": 2, "cost": 0.5, "size": 1.0},
        {"sourceId": 2, "destId": 3, "cost": 0.5, "size": 1.0},
    ],
}
PROFILE = "\n".join(
    [
        *(
            f"node{i} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, "
            "activation_size=1000000.0, parameter_size=1000000.0"
            for i in range(1, 5)
        ),
        *(f"\tnode{i} -- node{i + 1}" for i in range(1, 4)),
    ]
)
