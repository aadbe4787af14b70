"""Building a testbed, and taking it down whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.testbed.commands import Batch, batches
from benchmarks.testbed.layout import DATA_INTERFACE, PREFIX, Layout, lay_out
from benchmarks.testbed.processes import Launch, Outcome, run_all
from planner import Cluster
from planner.errors import PipeplanError

MASTER_PORT = 29_500
"""The same for every testbed: namespaces have ports of their own."""


class Testbed:
    """A cluster made real: ``with Testbed(cluster) as testbed: testbed.run(...)``.

    Args:
        cluster: its bandwidths are what the machine has to carry, so keep them small.

    Raises:
        PipeplanError: if the machine cannot have namespaces, or a link cannot be made real.
    """

    __test__ = False  # Not a test, whatever its name.

    def __init__(self, cluster: Cluster) -> None:
        self.layout: Layout = lay_out(cluster, os.getpid())

    def __enter__(self) -> Self:
        """Build everything; on any failure nothing stays behind."""
        reason = why_not()
        if reason is not None:
            raise PipeplanError(reason)
        try:
            for batch in batches(self.layout):
                _apply(batch)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take everything down, and end what still runs inside."""
        self._remove()

    def _remove(self) -> None:
        existing = set(_all_namespaces())
        for name in self.layout.all_namespaces:
            if name in existing:
                remove_namespace(name)

    def run(
        self,
        command: Sequence[str],
        devices: Sequence[str] | None = None,
        *,
        with_torchrun: bool = False,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        echo: bool = False,
    ) -> Outcome:
        """Run a command on every device, one rank each.

        Args:
            command: begins with the program, or with what torchrun takes (``-m`` or a script).
            devices: in the order of ranks; all in file order if None.
            with_torchrun: start a torchrun agent a device, as across machines, instead of the
                command itself with torch's environment variables.
            environment: set on top of this process's.
            timeout_s: after it everything is ended and the status is 124.
            echo: print lines as they come, with their rank.

        Raises:
            PipeplanError: naming a device that the cluster lacks.
        """
        names = self.layout.cluster.device_names if devices is None else tuple(devices)
        unknown = [name for name in names if name not in self.layout.data_addresses]
        if unknown or len(set(names)) < len(names) or not names:
            raise PipeplanError(
                f"devices: {list(names)} is not a choice of {list(self.layout.data_addresses)} "
                "without repetition; correct the names"
            )
        launches = [
            self._launch(command, names, rank, with_torchrun, environment or {})
            for rank in range(len(names))
        ]
        return run_all(launches, timeout_s=timeout_s, echo=echo)

    def _launch(
        self,
        command: Sequence[str],
        names: Sequence[str],
        rank: int,
        with_torchrun: bool,
        environment: Mapping[str, str],
    ) -> Launch:
        master = self.layout.control_addresses[names[0]]
        own = {"GLOO_SOCKET_IFNAME": DATA_INTERFACE, "OMP_NUM_THREADS": "1", **environment}
        if with_torchrun:
            agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names))]
            agent += ["--nproc-per-node", "1", "--node-rank", str(rank)]
            agent += ["--master-addr", master, "--master-port", str(MASTER_PORT)]
            agent += ["--local-addr", self.layout.control_addresses[names[rank]]]
            command = [*agent, *command]
        else:
            own |= {
                **{"RANK": str(rank), "WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0"},
                **{"MASTER_ADDR": master, "MASTER_PORT": str(MASTER_PORT)},
            }
        inside = ["ip", "netns", "exec", self.layout.namespaces[names[rank]], *command]
        # An agent ends its worker when it is asked to, which nobody does who is killed.
        return Launch(tuple(inside), own, signal.SIGTERM if with_torchrun else signal.SIGKILL)


def why_not() -> str | None:
    """Return why this machine cannot have a testbed; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the testbed needs Linux, this is {sys.platform}; run it on a Linux machine"
    if os.geteuid() != 0:
        return "the testbed makes network namespaces, which needs root; run it as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the testbed needs {' and '.join(missing)}; install the package iproute2"
    return _why_no_shaped_link()


def _why_no_shaped_link() -> str | None:
    """Try a namespace, a veth pair and a token bucket in it."""
    name = f"{PREFIX}-{os.getpid()}-trial"
    try:
        _apply(Batch("ip", None, (f"netns add {name}",)))
        lines = ("link add trial0 type veth peer name trial1",)
        _apply(Batch("ip", name, lines))
        lines = (
            "qdisc add dev trial0 root stab overhead -66 tbf rate 1mbit burst 4000b limit 9000",
        )
        _apply(Batch("tc", name, lines))
    except PipeplanError as error:
        return f"the testbed needs namespaces, veth and tbf, which this kernel refuses: {error}"
    finally:
        if name in _all_namespaces():
            remove_namespace(name)
    return None


def leftovers() -> list[str]:
    """Namespaces of testbeds whose owner has died."""
    return [name for name in _all_namespaces() if _is_left_over(name)]


def _is_left_over(name: str) -> bool:
    prefix, _, rest = name.partition("-")
    owner = rest.partition("-")[0]
    return prefix == PREFIX and owner.isdigit() and not Path(f"/proc/{owner}").exists()


def remove_namespace(name: str) -> None:
    """End every process in it, then delete it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for identifier in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(identifier), signal.SIGKILL)
    _call(["ip", "netns", "delete", name], "")


def _all_namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _apply(batch: Batch) -> None:
    if batch.tool == "settings":
        assert batch.namespace is not None
        script = "\n".join("echo {1} > {0}".format(*line.split("=")) for line in batch.lines)
        _call(["ip", "netns", "exec", batch.namespace, "sh", "-e"], script)
        return
    where = [] if batch.namespace is None else ["-n", batch.namespace]
    _call([batch.tool, *where, "-batch", "-"], "\n".join(batch.lines) + "\n")


def _call(command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise PipeplanError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}; if names "
            "are taken, run `python -m benchmarks.testbed clean`"
        )
