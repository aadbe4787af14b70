"""Layer graphs by hand whose microbatches have several lengths."""

from builders import GIGA, TERA, graph

from planner.model.figures import PHASES
from planner.model.layer_graph import LayerGraph

TOKENS = (10, 20, 40)
SHARES = (0.5, 0.3, 0.2)


def unequal(
    seconds: list[list[tuple[float, float]]], message_gb: list[float], stash: int = 0
) -> LayerGraph:
    """A chain of layers; of each, forward and backward seconds at every length, ascending."""

    def work(forward_s: float, backward_s: float) -> list[dict]:
        flops = [round(x * TERA) for x in (forward_s, backward_s / 2, backward_s / 2)]
        return [
            {"phase": phase, "operation_class": "product", "operations": 1}
            | {"flops": count, "traffic_bytes": 0}
            for phase, count in zip(PHASES, flops, strict=True)
        ]

    lengths = [{"tokens": n, "share": s} for n, s in zip(TOKENS, SHARES, strict=True)]
    rows = []
    for number, of_layer in enumerate(seconds):
        works = [work(*pair) for pair in of_layer]
        flops = {row["phase"]: row["flops"] for row in works[-1]}
        rows.append(
            {"name": f"l{number}", "stash_bytes": stash, "work": works[-1]}
            | {f"{phase}_flops": flops[phase] for phase in PHASES}
            | {f"{phase}_traffic_bytes": 0 for phase in PHASES}
            | {"lengths": [{**a, "work": b} for a, b in zip(lengths, works, strict=True)]}
        )
    sent = [round(gb * GIGA) for gb in message_gb]
    boundaries = [
        {"name": f"t{k}", "producer": f"l{k}", "users": [f"l{k + 1}"], "bytes": sent[-1]}
        | {"shape": [sent[-1]], "dtype": "int8", "requires_grad": True}
        | {"lengths": [{**a, "bytes": b} for a, b in zip(lengths, sent, strict=True)]}
        for k in range(len(seconds) - 1)
    ]
    return graph(rows, boundaries)
