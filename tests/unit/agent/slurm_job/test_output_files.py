"""A job whose output cannot be opened again would fail at a restart, and says so before a move."""

from __future__ import annotations

from pathlib import Path

from pollux.slurm_job.output_files import unopenable


def test_output_whose_folder_was_renamed_cannot_be_opened_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    path = str(logs / "a.log")
    assert unopenable([path]) is None, "Slurm makes it"
    (logs / "a.log").touch()
    assert unopenable([path]) is None
    logs.rename(tmp_path / "good")
    assert f"its output {path} cannot be opened again" in (unopenable([path]) or "")


def test_a_command_whose_script_was_removed_cannot_start_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert unopenable([], [str(script)]) is None
    script.unlink()
    assert f"{script}, which its command names, cannot be read" in (unopenable([], [str(script)]) or "")
