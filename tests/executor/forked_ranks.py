"""Ranks that are forked off one process, which imports torch and exports models for all of them.

``python forked_ranks.py RANKS [-m] PROGRAM PLANS ARGUMENT…`` runs a script or a module as so many
ranks, with the variables that torchrun sets. PLANS is a plan or a folder of them. A rank that fails
ends the others, and the status is 1.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from exports import share_exports_of


def main(ranks: int, program: list[str]) -> int:
    share_exports_of(Path(program[2 if program[0] == "-m" else 1]))
    receive, send = os.pipe()
    running = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(send)
            become(rank, ranks, int(os.read(receive, 5)))
            run(program)
            sys.stdout.flush()
            sys.stderr.flush()
            # As the executor ends: threads of torch that still wait for other ranks would abort it.
            os._exit(0)
        running[child] = rank
    # Only now, since a thread of the store would not be there in a fork.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:5d}".encode() * ranks)
    return ended(running)


def become(rank: int, ranks: int, port: int) -> None:
    """Set what torchrun tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    attempt = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in {**numbers, **meeting, **attempt}.items():
        os.environ[name] = str(value)


def run(program: list[str]) -> None:
    """Run a program as ``python`` would."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def ended(running: dict[int, int]) -> int:
    """Wait for all ranks; once one has failed the others are ended."""
    failed = False
    while running:
        child, status = os.wait()
        rank = running.pop(child)
        if status and not failed:
            failed = True
            print(f"status {status} of rank {rank}", file=sys.stderr)
            for other in running:
                os.kill(other, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
