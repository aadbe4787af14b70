"""``torchrun --nproc-per-node N -m executor plan.json``: train by a plan."""

import argparse
import os
import sys

from planner.errors import PipeplanError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m executor",
        description="Train a model by a plan, one process a device of the plan.",
    )
    parser.add_argument("plan", help="plan file written by `pipeplan plan`")
    parser.add_argument("--steps", type=_positive, default=20, help="iterations (default 20)")
    parser.add_argument(
        "--data",
        choices=["text", "random"],
        default="text",
        help="text: bytes of the Python standard library's sources (default), for models of 256 "
        "tokens or more; "
        "random: tensors in the shapes of the model's example batch",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="allow importing this factory, for a plan whose model is not in the zoo",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main() -> int:
    """Run and return the exit status: 0 done, 1 the plan cannot be run, 2 wrong usage."""
    options = _parser().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    try:
        _run(options, rank)
    except PipeplanError as error:
        if rank == 0:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run(options: argparse.Namespace, rank: int) -> None:
    from executor.model import allowed_factory
    from executor.train import require_runnable, world_size_message
    from planner.artifacts.plan import Plan

    plan = Plan.load(options.plan)
    # Refused before any process group exists, so that no rank waits for another.
    require_runnable(plan)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != len(plan.ranks):
        raise PipeplanError(world_size_message(plan, world_size))
    factory = allowed_factory(plan, options.model)

    import torch.distributed as dist

    from executor.train import train

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        # Not started by torchrun: a plan of one rank needs no port to meet others at.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        history = train(
            plan,
            factory,
            steps=options.steps,
            data=options.data,
            seed=options.seed,
            report=(lambda metrics: print(metrics.line(), flush=True)) if rank == 0 else None,
        )
        if rank == 0:
            print(
                f"trained {len(history)} steps on {world_size} ranks: loss "
                f"{history[0].loss:.4f} -> {history[-1].loss:.4f}",
                flush=True,
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
