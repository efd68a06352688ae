"""The output folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.recipes.rundir import RunDirectory, write_json


def test_appears_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b"
    with RunDirectory(final) as folder:
        write_json(folder / "x.json", {"x": 1})
        assert not final.exists() and folder.parent == final.parent
    assert [path.name for path in final.iterdir()] == ["x.json"]
    assert list(final.parent.iterdir()) == [final]


def test_takes_the_place_of_an_empty_folder(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "empty") as folder:
        (tmp_path / "empty").mkdir()
        (folder / "x").touch()
    assert (tmp_path / "empty" / "x").exists()


def test_leaves_nothing_after_an_error_and_keeps_older_folders(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ZeroDivisionError), RunDirectory(tmp_path / "old" / "a" / "b") as folder:
        (folder / "metrics.jsonl").touch()
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


def test_keeps_a_model_that_was_saved_before_the_error(tmp_path: Path) -> None:
    output = RunDirectory(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), output as folder:
        (folder / "model.safetensors").touch()
        raise ZeroDivisionError
    assert output.kept is not None and (output.kept / "model.safetensors").exists()
    assert not (tmp_path / "a").exists()


def test_never_replaces_what_came_up_meanwhile(tmp_path: Path) -> None:
    output = RunDirectory(tmp_path / "a")
    with pytest.raises(OSError), output as folder:
        (folder / "mine").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "theirs").touch()
    assert (tmp_path / "a" / "theirs").exists()
    assert output.kept is not None and (output.kept / "mine").exists()


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
