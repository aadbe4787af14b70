"""Which file is of which format, and files that are none."""

import os
from pathlib import Path

import pytest
from link_files import topology

from planner.errors import PipeplanError
from planner.interop import imported as formats
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"hello\n", "is no file that can be imported"),
        (b"<html>", "is no file that can be imported"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "is no file that can be imported"),
        (topology(["X PIX", "PIX X"]).encode() + b"\xff", "cannot be read as UTF-8 text"),
        (topology(["X PIX", "PIX X"]).encode() + b"9" * 400, "line 9: a number of 400 digits"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, contents: bytes, expected: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(contents)
    with pytest.raises(PipeplanError) as caught:
        import_cluster(path, options=ImportOptions("T4"))
    assert str(caught.value).startswith(f"{path}: {expected}")


@pytest.mark.parametrize("name", ["nvidia-smi", "auto"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, reason in [("nowhere", "no such file"), (".", "no reg"), ("fifo", "no regular")]:
        with pytest.raises(PipeplanError, match=reason):
            import_cluster(tmp_path / path, name)


def test_a_file_far_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.txt").write_text(topology(["X PIX", "PIX X"]))
    monkeypatch.setattr(formats, "MOST_BYTES", 100)
    with pytest.raises(PipeplanError, match="more than the 100"):
        import_cluster(tmp_path / "large.txt")
