"""Schedules of torch.distributed.pipelining, from the words torch writes."""

from pathlib import Path

import pytest
from builders import orders

from planner.errors import PipeplanError
from planner.interop.torch_pipelining import read_schedule_csv


def read(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    rows = read_schedule_csv(path).rows
    return {f"rank{rank}": " ".join(map(str, row)) for rank, row in enumerate(rows)}


def test_a_row_is_a_rank_and_empty_cells_are_idle(tmp_path: Path) -> None:
    found = read(tmp_path, "0F0,0F1,,,0B0,0B1\n,1F0,1B0, 1F1 ,1B1,\n")
    assert found == {"rank0": "0F0 0F1 0B0 0B1", "rank1": "1F0 1B0 1F1 1B1"}


def test_communication_is_left_out(tmp_path: Path) -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert read(tmp_path, text) == {"rank0": "0F0 0B0", "rank1": "1F0 1B0"}


def test_an_overlapped_pair_is_its_two_operations(tmp_path: Path) -> None:
    assert read(tmp_path, "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n") == {
        "rank0": "0F0 0F1 0F2 0B0 0B1 0B2"
    }


def test_torch_reads_and_writes_the_same_words(tmp_path: Path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    action = schedules._Action.from_str
    words = ["0F0", "(0F1;0B0)OVERLAP_F_B", "0I1", "0SEND_F1", "0W1", "0UNSHARD", "0REDUCE_GRAD"]
    assert [str(action(word)) for word in words] == words
    assert read(tmp_path, ",".join(words)) == {"rank0": "0F0 0F1 0B0 0I1 0W1"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, cell 2 is '1X0'"),
        ("0F0,F0\n", "row 1, cell 2 is 'F0'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B\n", "row 1, cell 2 is '(0F1;0Q0)OVERLAP_F_B'"),
        ("0F0,0B0\n,,\n", "row 2 (rank 1) has no F, B, I or W"),
        ("", "it is empty"),
    ],
)
def test_wrong_words_are_named_by_row_and_cell(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        read(tmp_path, text)
    assert place in str(caught.value)
    assert "schedule.csv" in str(caught.value)


def test_what_is_read_is_what_orders_say(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n")
    assert read_schedule_csv(path).rows == (orders(d0="0F0 0B0")["d0"],)
