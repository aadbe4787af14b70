"""SIGTERM is heard where it is taken, and only by the process it was sent to."""

import os
import resource
import signal
import time

import pytest

from executor.distributed.stop import TermSignal


@pytest.fixture
def term() -> TermSignal:
    found = TermSignal()
    found.take()
    yield found
    found.give_back()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_it_is_heard(term: TermSignal) -> None:
    assert not term.arrived(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert term.arrived(5)


def test_waiting_for_it_can_be_ended(term: TermSignal) -> None:
    term.wake()
    assert not term.arrived(3600)  # Longer than any test may take.


def test_a_child_ends_by_its_own_and_nobody_else_hears(term: TermSignal) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not term.arrived(0.5)


def test_a_handler_of_the_users_stays() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        TermSignal().take()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_is_heard_by_a_process_with_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1100
    if hard != resource.RLIM_INFINITY and hard < many + 100:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 100), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(many)]
    try:
        late = TermSignal()
        late.wake()
        assert not late.arrived(5)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
