"""Nothing in a checkpoint is believed unchecked."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from thread_ranks import assert_holds, some, together

from executor.checkpoint import Checkpoint, save_checkpoint
from planner.errors import PipeplanError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "run", 3, some(3), {"seed": 1})


def edit(saved: Path, change: Callable[[dict], object]) -> None:
    data = json.loads((saved / "manifest.json").read_text())
    change(data)
    (saved / "manifest.json").write_text(json.dumps(data))


def refused(path: Path, names: tuple[str, ...] = ("parameters/a.weight",)) -> str:
    with pytest.raises(PipeplanError) as caught:
        Checkpoint.open(path).read(names)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../rank-00000.safetensors", "/etc/passwd", "rank-00000.safetensors/..", "rank-0.pt", ""],
)
def test_a_file_elsewhere_is_refused(saved: Path, name: str) -> None:
    edit(saved, lambda data: data.update(files={name: data["files"]["rank-00000.safetensors"]}))
    assert "manifest.json: " in refused(saved)


def test_links_and_pipes_are_not_read(saved: Path, tmp_path: Path) -> None:
    for name in ("rank-00000.safetensors", "manifest.json"):
        (saved / name).rename(tmp_path / name)
        (saved / name).symlink_to(tmp_path / name)
        assert f"{name}: not a file of the checkpoint itself" in refused(saved)
        (saved / name).unlink()
        (tmp_path / name).rename(saved / name)
    saved.rename(tmp_path / "elsewhere")
    saved.symlink_to(tmp_path / "elsewhere")
    assert "is skipped: a link; name the folder" in refused(saved.parent)
    assert_holds(Checkpoint.open(saved), some(3))  # Named by the user himself.
    (saved / "rank-00000.safetensors").unlink()
    os.mkfifo(saved / "rank-00000.safetensors")
    assert "not a file of the checkpoint itself" in refused(saved)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    parts = [{"a": torch.zeros(4)}, {"b": torch.ones(4)}]
    folder, _ = together(
        2, lambda ranks: save_checkpoint(tmp_path, 5, parts[ranks.rank], {}, ranks=ranks)
    )
    shard = folder / "rank-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"\x01")
    assert "its SHA-256 is" in refused(folder, ("a",))
    shard.write_bytes(content[:-1])
    assert f"{len(content) - 1} bytes, the manifest says {len(content)}" in refused(folder, ("a",))
    shard.unlink()
    assert "rank-00000.safetensors: not a file of the checkpoint" in refused(folder, ("a",))


def test_a_pickle_in_place_of_a_shard_is_not_run(saved: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    content = pickle.dumps(Bomb())
    (saved / "rank-00000.safetensors").write_bytes(content)
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(saved, lambda data: data["files"].update({"rank-00000.safetensors": record}))
    assert "take another checkpoint" in refused(saved)
    assert not (tmp_path / "ran").exists()


FORMS = {
    "format": (lambda d: d.update(format="pipeplan-checkpoint/3"), "upgrade Pipeplan"),
    "kind": (lambda d: d.update(format="pipeplan/1"), "give a checkpoint's manifest"),
    "field": (lambda d: d.update(run="x"), "unknown field"),
    "step": (lambda d: d.update(step=-1), "step: expected at least 0"),
    "files": (lambda d: d.update(files={}), "not in the checkpoint: parameters/a.weight; resume"),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_manifest_that_is_wrong_is_refused(saved: Path, case: str) -> None:
    change, message = FORMS[case]
    edit(saved, change)
    assert message in refused(saved)


PIECES = {
    "missing": ({"w@0,0/2,3": (1, 3)}, "'w' has 6 elements, 3 of them are in rank-00000"),
    "outside": ({"w@1,0/2,3": (2, 3)}, "'w@1,0/2,3' of shape [2, 3] is no part of a tensor"),
    "other dimensions": ({"w@0/2,3": (2, 3)}, "is no part of a tensor"),
    "two shapes": ({"w@0,0/2,3": (1, 3), "w@1,0/3,2": (1, 2)}, "is no part of a tensor"),
    "endless": ({f"w@{'9' * 401}/2": (1,)}, "not in the checkpoint: w; resume"),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_that_make_up_no_tensor_are_refused(saved: Path, case: str) -> None:
    shapes, message = PIECES[case]
    path = saved / "rank-00000.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    content = path.read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(saved, lambda data: data["files"].update({path.name: record}))
    assert message in refused(saved, ("w",))


def test_what_is_not_a_checkpoint_is_told(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "there is no folder step-" in refused(tmp_path)


def test_the_checkpoint_that_was_completed_last_is_opened(saved: Path) -> None:
    """Not that of the latest step: training went on from an earlier one."""
    earlier = save_checkpoint(saved.parent, 2, some(2), {})
    assert Checkpoint.open(saved.parent).folder == earlier


@pytest.mark.parametrize("damaged", ["rank-00000.safetensors", "manifest.json"])
def test_a_checkpoint_that_is_not_whole_is_skipped_with_a_line(
    saved: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer = save_checkpoint(saved.parent, 4, some(4), {})
    (newer / damaged).write_bytes((newer / damaged).read_bytes()[:-9])
    (saved.parent / ".step-00000005.0123456789abcdef.writing").mkdir()
    assert Checkpoint.open(saved.parent).folder == saved
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"{newer} is skipped: " in line for line in lines), lines
    assert any(".writing is skipped: the training that wrote it was killed" in x for x in lines)


def test_a_checkpoint_may_be_named_by_its_manifest(saved: Path) -> None:
    assert Checkpoint.open(saved / "manifest.json").folder == saved


def test_whoever_may_read_the_manifest_may_read_the_shards(saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    assert shard.stat().st_mode == (saved / "manifest.json").stat().st_mode


def test_reading_into_tensors_asks_for_the_same_forms(saved: Path) -> None:
    targets = {name: torch.full_like(tensor, 9) for name, tensor in some(3).items()}
    Checkpoint.open(saved).read_into(targets)
    assert all(targets[name].equal(tensor) for name, tensor in some(3).items())
    with pytest.raises(PipeplanError, match=r"is float32 \[3, 4\], the model's is float32 \[2\]"):
        Checkpoint.open(saved).read_into({"parameters/a.weight": torch.ones(2)})
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    Checkpoint.open(saved).read_into({"parameters/a.weight": parameter})
    assert parameter.grad_fn is None
    assert parameter.equal(some(3)["parameters/a.weight"])
