"""Which file is of which format, whose batch it is, and files that are none."""

import os
from pathlib import Path

import pytest
from profiles import DAPPLE, PIPEDREAM, imported, node

from planner.errors import PipeplanError
from planner.interop.importing import formats
from planner.interop.importing.formats import import_file
from planner.interop.importing.imported import ImportOptions


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("graph.txt", PIPEDREAM, "pipedream"),
        ("bert-24-pbs-6.txt", DAPPLE, "dapple"),
        ("bert.txt", DAPPLE, "pipedream"),
    ],
)
def test_the_format_is_told_from_name_and_contents(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    found, read = import_file(str(tmp_path / name))
    assert found == expected
    for same in ("dapple", "pipedream"):
        assert import_file(tmp_path / name, same)[1].graph.record == read.graph.record


@pytest.mark.parametrize(
    ("name", "told", "samples", "note"),
    [
        ("vgg-19-pbs-32.txt", None, 32, "from the file's name (pbs-32)"),
        ("vgg-19-pbs-32-simplified.txt", None, 32, "from the file's name (pbs-32)"),
        ("vgg-19-pbs-32.txt", 32, 32, "as given"),
        ("vgg-19-pbs-32.txt", 8, 8, "as given; the file's name says 32"),
        ("vgg16.txt", 64, 64, "as given"),
        ("vgg16.txt", None, 1, "does not say of how many samples"),
        ("mypbs-3.txt", None, 1, "does not say of how many samples"),
        ("x-pbs-0.txt", None, 1, "does not say of how many samples"),
        ("x-pbs-99999999999.txt", None, 1, "does not say of how many samples"),
    ],
)
def test_samples_are_those_of_the_batch_that_was_measured(
    tmp_path: Path, name: str, told: int | None, samples: int, note: str
) -> None:
    read = imported(tmp_path, PIPEDREAM, name, samples_per_microbatch=told)
    assert read.graph.record.samples_per_microbatch == samples
    assert read.job.samples_per_microbatch == samples
    assert read.job.precision == read.graph.record.precision
    assert note in read.notes[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("vgg16.txt", "vgg16"), ("vgg16/graph.txt", "vgg16"), ("bert-pbs-6.txt", "bert-pbs-6")],
)
def test_models_are_called_by_their_file_or_folder(
    tmp_path: Path, path: str, expected: str
) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    assert imported(tmp_path, PIPEDREAM, path).graph.name == expected


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"hello\n", "is no file that can be imported"),
        (b"<html>", "is no file that can be imported"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "is no file that can be imported"),
        (node("a").encode() + b"\xff", "cannot be read as UTF-8 text"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, contents: bytes, expected: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(contents)
    with pytest.raises(PipeplanError) as caught:
        import_file(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_file_read_as_a_format_is_told_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("hello\n")
    with pytest.raises(PipeplanError, match="line 1: 'hello' is neither a node nor an edge"):
        import_file(path, "pipedream")


@pytest.mark.parametrize("name", ["pipedream", "auto"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, reason in [("nowhere", "no such file"), (".", "no reg"), ("fifo", "no regular")]:
        with pytest.raises(PipeplanError, match=reason):
            import_file(tmp_path / path, name)


def test_a_file_far_too_large_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.txt").write_text(PIPEDREAM)
    monkeypatch.setattr(formats, "MOST_BYTES", 100)
    with pytest.raises(PipeplanError, match="more than the 100"):
        import_file(tmp_path / "large.txt")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device_type": "GTX-1"}, "device_type: 'GTX-1' is unknown; use one of V100-16GB"),
        ({"samples_per_microbatch": 0}, "samples_per_microbatch: expected 1 to 1048576, found 0"),
        ({"samples_per_microbatch": 10**9}, "samples_per_microbatch"),
    ],
)
def test_wrong_options_are_refused(options: dict, named: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        ImportOptions(**options)
    assert named in str(caught.value)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match="'onnx' is unknown; use one of auto, dapple, pipedr"):
        import_file(tmp_path / "x", "onnx")
