"""Checkpoints are whole or not there, and equal bit by bit."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import forked
from thread_ranks import assert_holds, some, together

from executor.checkpoint import Checkpoint, Ranks, save_checkpoint
from executor.distributed.member_group import MemberShare
from executor.training.saved_state import boxes, pieces_of
from planner.errors import PipeplanError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6
    )
)
def test_every_tensor_comes_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, forms: list
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    tensors = {
        f"parameters/{index}": torch.randn(shape).mul(9).to(dtype)
        for index, (dtype, shape) in enumerate(forms)
    }
    written = save_checkpoint(folder, 7, tensors, {"seed": 3, "loss": [1.5, None]})
    assert written == folder / "step-00000007"
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.step, checkpoint.facts) == (7, {"seed": 3, "loss": [1.5, None]})
    assert set(checkpoint.names()) == set(tensors)
    assert_holds(checkpoint, tensors)


def test_views_and_tied_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"a": whole, "b": whole.t(), "c": whole[1], "d": whole, "e": whole[:, ::2]}
    save_checkpoint(tmp_path, 1, tensors, {})
    assert_holds(Checkpoint.open(tmp_path), tensors)


def test_ranks_write_their_shards_and_any_rank_reads_all(tmp_path: Path) -> None:
    parts = [{f"parameters/{rank}": torch.full((2,), float(rank))} for rank in range(3)]
    parts[1] = {}
    results = together(
        3, lambda ranks: save_checkpoint(tmp_path, 5, parts[ranks.rank], {}, ranks=ranks)
    )
    assert results == [tmp_path / "step-00000005"] * 3
    assert sorted(path.name for path in results[0].iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00002.safetensors",
    ]
    assert_holds(Checkpoint.open(tmp_path), {**parts[0], **parts[2]})


def test_ranks_write_pieces_and_any_rank_reads_the_whole(tmp_path: Path) -> None:
    """Members have shares of a fused dimension; of these, replicas have ranges of elements."""
    whole = torch.arange(120.0).view(4, 6, 5)
    ranges = [(0, 7), (7, 31), (31, 60)]

    def write(ranks: Ranks) -> Path:
        share = MemberShare(1, (2, 4), 2, ranks.rank // 3)
        begin, end = ranges[ranks.rank % 3]
        own = share.of(whole)
        pieces = [*pieces_of(own.flatten()[begin:end], own.shape, begin, share)]
        return save_checkpoint(tmp_path, 5, {"optimizer/w/m": pieces}, {}, ranks=ranks)

    together(6, write)
    assert_holds(Checkpoint.open(tmp_path), {"optimizer/w/m": whole})


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_range_hold_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    flat = torch.arange(math.prod(shape))
    begin = data.draw(st.integers(0, len(flat)))
    end = data.draw(st.integers(begin, len(flat)))
    found = []
    for offset, size in boxes(shape, begin, end):
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        found += flat.view(shape)[box].flatten().tolist()
    assert found == [*range(begin, end)]
    assert len([*boxes(shape, begin, end)]) <= max(1, 2 * len(shape) - 1)


def test_a_failure_on_one_rank_is_told_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, some(1), {})
    parts = [some(2), {"parameters/z": torch.zeros(2, dtype=torch.complex128)}]
    results = together(
        2, lambda ranks: save_checkpoint(tmp_path, 2, parts[ranks.rank], {}, ranks=ranks)
    )
    for error in results:
        assert "rank 1: a checkpoint holds no tensors of type torch.complex128" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert_holds(Checkpoint.open(tmp_path), some(1))


@pytest.mark.extensive
def test_processes_write_and_fail_together(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "checkpoint_worker.py"
    done = forked(2, str(worker), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.split()) == sorted("rank 0 done rank 1 done".split())


def test_a_tensor_that_two_ranks_write_is_refused(tmp_path: Path) -> None:
    results = together(2, lambda ranks: save_checkpoint(tmp_path, 2, some(2), {}, ranks=ranks))
    for error in results:
        assert "are in rank-00000.safetensors, rank-00001.safetensors; each has to" in str(error)


def test_folders_that_hosts_do_not_share_are_named_with_the_remedy(tmp_path: Path) -> None:
    results = together(
        2,
        lambda ranks: save_checkpoint(
            tmp_path / str(ranks.rank), 2, {str(ranks.rank): torch.zeros(1)}, {}, ranks=ranks
        ),
    )
    for error in results:
        assert "rank 1: " in str(error)
        assert "on a file system that all hosts share" in str(error)


@pytest.mark.parametrize("facts", [{"loss": float("nan")}, {"x": object()}])
def test_facts_that_are_not_json_are_refused(tmp_path: Path, facts: dict) -> None:
    with pytest.raises(PipeplanError, match="expected plain JSON values"):
        save_checkpoint(tmp_path, 1, some(1), facts)


# --- crashes ------------------------------------------------------------------------------------


class Crash(BaseException):
    """Nobody catches it, as nobody catches a power cut."""


class Crashes:
    """Ends the process, as it were, at the n-th thing done to files."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

    def __init__(self) -> None:
        self.left: int | None = None

    def hook(self, event: str, arguments: tuple) -> None:
        if self.left is None or event not in self.EVENTS:
            return
        if event == "open" and "/" not in str(arguments[0]):
            return  # A number: a file that is open already.
        if self.left == 0:
            raise Crash
        self.left -= 1


CRASHES = Crashes()
sys.addaudithook(CRASHES.hook)


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crashes]:
    real = os.fsync

    def fsync(handle: int) -> None:
        CRASHES.hook("open", ("/fsync",))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    yield CRASHES
    CRASHES.left = None


@pytest.mark.parametrize("step", [2, 3])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, crashes: Crashes, step: int
) -> None:
    """Of the step before, or the new one if it was complete; step 2 is saved once more."""
    for moment in range(1000):
        folder = tmp_path / str(moment)
        save_checkpoint(folder, 1, some(1), {}, keep=2)
        save_checkpoint(folder, 2, some(2), {}, keep=2)
        crashes.left = moment
        try:
            save_checkpoint(folder, step, some(30), {}, keep=2)
            done = crashes.left > 0
        except Crash:
            done = False
        crashes.left = None
        checkpoint = Checkpoint.open(folder)
        if checkpoint.read(["buffers/count"])["buffers/count"] == 30:
            assert_holds(checkpoint, some(30))
            assert checkpoint.step == step
        else:
            assert not done
            assert_holds(checkpoint, some(2))
            assert_holds(Checkpoint.open(folder / "step-00000001"), some(1))
        save_checkpoint(folder, 4, some(4), {}, keep=1)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000004"]
        assert_holds(Checkpoint.open(folder), some(4))
        if done:
            assert moment > 15
            return
    raise AssertionError("no save ended")


def test_only_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    def steps() -> list[str]:
        return sorted(path.name.removeprefix("step-000000") for path in tmp_path.glob("step-*"))

    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000000").mkdir()  # Empty: not a checkpoint, somebody else's.
    rest = ["00", "step-notes"]
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, some(step), {}, keep=2)
    assert steps() == ["00", "20", "30", "step-notes"]
    # Training went on from step 20 with other data: what was newer before stays.
    save_checkpoint(tmp_path, 25, some(25), {}, keep=2)
    assert steps() == sorted(["20", "25", "30", *rest])
    save_checkpoint(tmp_path, 25, some(26), {}, keep=2)
    assert steps() == sorted(["20", "25.1", "30", *rest])
    assert_holds(Checkpoint.open(tmp_path), some(26))
    save_checkpoint(tmp_path, 40, some(40), {})
    assert steps() == sorted(["20", "25.1", "30", "40", *rest])
    save_checkpoint(tmp_path, 41, some(41), {}, keep=1)
    assert steps() == sorted(["41", *rest])
    with pytest.raises(PipeplanError, match="keep at least 1"):
        save_checkpoint(tmp_path, 50, some(50), {}, keep=0)
