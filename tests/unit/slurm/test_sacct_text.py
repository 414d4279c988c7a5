"""Rows of `sacct --parsable2` in files that nobody has made by sacct."""

from __future__ import annotations

from pathlib import Path

from polluxd.slurm.sacct_text import rows


def test_a_row_without_an_end_is_read_in_parts(tmp_path: Path) -> None:
    """As of a file with a hole, which may be a terabyte long."""
    file = tmp_path / "log"
    with file.open("wb") as made:
        made.write(b"JobID|JobName\n7|a|b\n")
        made.truncate(50 << 20)
    names, found = rows(file, ["JobID"])
    assert names == ["JobID", "JobName"]
    assert next(found) == (2, ["7", "a|b"])
    left = [fields for _, fields in found]
    assert len(left) > 700
    assert not any(left), "none is a row"


def test_rows_of_a_usual_length_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("JobID|JobName\n" + f"7|{'x' * 60_000}\n" * 3)
    _, found = rows(file, ["JobID"])
    assert [fields for _, fields in found] == [["7", "x" * 60_000]] * 3
