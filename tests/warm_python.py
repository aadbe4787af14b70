"""``python`` without its start: programs are forked off one process that has imported everything.

An import of torch and of the solver takes seconds, and many tests run programs. ``warm_python()``
hands its words, files, folder and environment to a server, waits for the fork that runs the program
there, and ends as that ends. What such a test does not show is that a program finds its imports by
itself, and what signals do; other tests start programs the usual way.
"""

import json
import os
import signal
import socket
import sys

_SIZE_BYTES = 8


def warm_python() -> str:
    """Return the path of a program that takes what ``python`` does: ``-m``, ``-c`` or a script."""
    if not _started:
        _started.append(_start())
    return _started[0][1]


# --- the tests' side ------------------------------------------------------------------------------

_started: list[tuple[object, str]] = []
"""The server of this process, which ends with it, and its program."""


def _start() -> tuple[object, str]:
    import shlex
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm-python-")
    path, program = os.path.join(folder, "socket"), os.path.join(folder, "python")
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the programs, not for what they are forked off.
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    command = shlex.join([sys.executable, "-I", "-S", __file__, "run", path])
    with open(program, "w") as script:
        script.write(f'#!/bin/sh\nexec {command} "$@"\n')
    os.chmod(program, 0o755)
    return server, program


# --- the command ----------------------------------------------------------------------------------


def run(path: str, words: list[str]) -> None:
    """Have a program run, hand signals on to it, and end with its status or by its signal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        told = json.dumps({"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
        socket.send_fds(connection, [b"-"], [0, 1, 2])
        connection.sendall(_number(len(told)) + told)
        answers = connection.makefile("rb")
        child = int.from_bytes(answers.read(_SIZE_BYTES), "big")
        for handed_on in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handed_on, lambda number, _: os.kill(child, number))
        answer = answers.read()
    status = int(answer) if answer else 1
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _number(value: int) -> bytes:
    return value.to_bytes(_SIZE_BYTES, "big")


# --- the server -----------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Fork a process for each command, until standard input ends."""
    import selectors
    import shutil

    _import_everything()
    with socket.create_server(path, family=socket.AF_UNIX) as listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _supervise(connection)
            connection.close()
    shutil.rmtree(os.path.dirname(path))


def _import_everything() -> None:
    """Import what programs do, a trace's lazy imports among it."""
    import gc
    import importlib

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = folder
    names = (
        *("torch.distributed.launcher.api", "ortools.sat.python.cp_model", "matplotlib.pyplot"),
        *("executor.training.training", "executor.launch.prepare", "planner.search.solve"),
        *("planner.cli", "planner.cli.plan", "planner.interop.adopted"),
    )
    for name in names:
        importlib.import_module(name)
    from planner.job import Job
    from planner.tracing.trace import trace

    trace("models.unet:unet_tiny", Job())
    del sys.path[0]
    gc.collect()
    gc.freeze()


def _supervise(connection: socket.socket) -> None:
    """Run a program in a child, tell its end, and end it where nobody waits for it any more."""
    import selectors

    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as reader:
        size = int.from_bytes(reader.read(_SIZE_BYTES), "big")
        told = json.loads(reader.read(size))
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _become(told["words"], told["cwd"], told["env"])
    for file in files:
        os.close(file)
    connection.sendall(_number(child))
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(os.pidfd_open(child), selectors.EVENT_READ)
    is_gone = any(key.fileobj is connection for key, _ in selector.select())
    if is_gone:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not is_gone:
        connection.sendall(str(status).encode())
    os._exit(0)


def _become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run a program as ``python`` would, and end."""
    import io
    import runpy
    import types

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    is_unbuffered = words[0] == "-u"
    words = words[is_unbuffered:]
    out = open(1, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for good, as all three
    sys.stdout = io.TextIOWrapper(out, write_through=is_unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = words[0], words[1:]
    if kind == "-m":
        sys.argv = rest
        sys.path[:0] = [cwd, *more]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = ["", *more]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102 - as python does
    else:
        sys.argv = words
        sys.path[:0] = [os.path.dirname(os.path.abspath(kind)), *more]
        runpy.run_path(kind, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    {"run": lambda path, *words: run(path, list(words)), "serve": serve}[sys.argv[1]](*sys.argv[2:])
