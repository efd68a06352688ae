"""A damaged checkpoint is found before any of it is used; a whole one is never called damaged."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_faults import checkpoint, is_whole

from onward.checkpoint import read_checkpoint
from onward.checkpoint.tensor_file import read_tensors
from onward.errors import CheckpointError
from onward.train.checkpointing import read_newest

FILES = (
    "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors",
    "trainer_state.json",
)  # fmt: skip
Damage = Callable[[Path, random.Random], None]


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def zero(path: Path, draw: random.Random) -> None:
    """Zeros in the place of a part of the file, as of blocks that a disk has lost."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    length = draw.randint(1, 4096)
    lost = data[start : start + length]
    data[start : start + length] = bytes(len(lost))
    if lost.count(0) == len(lost):  # there were zeros: nothing is damaged
        data[0] ^= 255
    path.write_bytes(data)


def append(path: Path, draw: random.Random) -> None:
    more = draw.choice([b"\n", b" ", b"\0", draw.randbytes(1)]) * draw.randint(1, 9)
    path.write_bytes(path.read_bytes() + more)


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    """The file of the same name from another checkpoint of the run."""
    other = path.parent.with_name("other") / path.name
    if other.read_bytes() == path.read_bytes():
        return flip(path, draw)
    shutil.copy(other, path)
    return None


def exchange(path: Path, draw: random.Random) -> None:
    """Two files of the checkpoint in each other's place."""
    other = path.with_name(draw.choice([name for name in FILES if name != path.name]))
    path.rename(path.with_suffix(".moved"))
    other.rename(path)
    path.with_suffix(".moved").rename(other)


def edit(path: Path, draw: random.Random) -> None:
    """An edited entry of the manifest for the file: another's sha256, another size, another name.
    Every second time with the manifest's own sha256 made right again."""
    manifest = path.with_name("manifest.json")
    body = json.loads(manifest.read_bytes())
    name = draw.choice([n for n in FILES if n != "manifest.json"])
    record = body["files"][name]
    match draw.randrange(5):
        case 0:
            record["sha256"] = draw.choice([r for n, r in body["files"].items() if n != name])[
                "sha256"
            ]
        case 1:
            record["bytes"] += draw.choice([-1, 1, 2**40, -(2**40)])
        case 2:
            body["files"][draw.choice([f"../other/{name}", f"/{name}", f"./{name}"])] = record
        case 3:
            record["more"] = 1
        case 4:
            body["files"][name] = draw.choice([None, 1, {}, [], {"bytes": "9", "sha256": "0"}])
    if draw.random() < 0.5:
        del body["sha256"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps(body, indent=2) + "\n")


def link(path: Path, draw: random.Random) -> None:
    """A link to the same bytes elsewhere: a checkpoint has files of its own alone."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGES: dict[str, Damage] = {
    f.__name__: f for f in (flip, truncate, zero, append, remove, swap, exchange, edit, link)
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_found(file: str, damage: str, tmp_path: Path) -> None:
    checkpoint(1).packed().write(tmp_path / "whole")
    checkpoint(2).packed().write(tmp_path / "other")
    for seed in range(6):
        damaged = tmp_path / str(seed)
        shutil.copytree(tmp_path / "whole", damaged)
        DAMAGES[damage](damaged / file, random.Random(f"{file} {damage} {seed}"))
        if file == "manifest.json" and damage == "swap":
            (damaged / "config.json").write_text('{"other": 1}')
        with pytest.raises(CheckpointError, match=rf"{damaged}/?.*") as error:
            read_checkpoint(damaged)
        assert "\n" not in str(error.value)


@pytest.mark.sample(10)
@pytest.mark.parametrize("part", range(50))
def test_random_damage_is_passed_over_before_a_tensor_is_read(
    part: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 1,000 random damages, 20 in each part, to the newest of two checkpoints of a run: the
    older one is resumed from, with one line about the newer; `strict` raises that line."""
    read: list[Path] = []

    def noted(path: Path) -> dict[str, torch.Tensor]:
        read.append(path)
        return read_tensors(path)

    monkeypatch.setattr("onward.checkpoint.checkpoint.read_tensors", noted)
    for updates, place in ((1, "run/checkpoint-1"), (2, "run/checkpoint-2"), (3, "other")):
        checkpoint(updates, numbers=300).packed().write(tmp_path / place)
    for seed in range(20 * part, 20 * part + 20):
        run = tmp_path / str(seed)
        shutil.copytree(tmp_path / "run", run)
        shutil.copytree(tmp_path / "other", run / "other")
        draw = random.Random(seed)
        file, damage = draw.choice(FILES), draw.choice(list(DAMAGES))
        DAMAGES[damage](run / "checkpoint-2" / file, draw)
        caplog.clear()
        path, found = read_newest(run, strict=False)
        assert path.name == "checkpoint-1" and is_whole(found), (seed, file, damage)
        (told,) = (r.message for r in caplog.records)
        assert "checkpoint-2" in told and "\n" not in told, (seed, file, damage)
        for place in (run, run / "checkpoint-2"):
            with pytest.raises(CheckpointError) as error:
                read_newest(place, strict=True)
            assert told.startswith(str(error.value)), (seed, file, damage)
        assert not any(p.parent.name == "checkpoint-2" for p in read), (seed, file, damage)


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", range(10))
def test_whole_ones_are_read(part: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for updates in range(20 * part + 1, 20 * part + 21):
        path = tmp_path / f"checkpoint-{updates}"
        micro_steps = updates % 3
        checkpoint(updates, micro_steps=micro_steps, numbers=updates).packed().write(path)
        newest, found = read_newest(tmp_path, strict=True)
        assert newest == path and is_whole(found)
    assert not caplog.records


def test_the_newest_whole_one_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for updates in (8, 9, 10):  # 10 is newer than 9, whatever their names' order
        checkpoint(updates).packed().write(tmp_path / f"checkpoint-{updates}")
    flip(tmp_path / "checkpoint-10" / "model.safetensors", random.Random(0))
    (tmp_path / "checkpoint-9" / "manifest.json").write_text("{}")
    os.utime(tmp_path / "checkpoint-8", (2**31, 2**31))  # clocks do not decide
    path, found = read_newest(tmp_path, strict=False)
    assert path.name == "checkpoint-8"
    assert is_whole(found)
    told = [r.message for r in caplog.records]
    assert len(told) == 2
    assert "checkpoint-10/model.safetensors is damaged: its sha256" in told[1]
    with pytest.raises(CheckpointError, match=r"checkpoint-9/manifest\.json is not of the format"):
        read_newest(tmp_path, strict=True)


def test_all_are_damaged(tmp_path: Path) -> None:
    checkpoint(1).packed().write(tmp_path / "checkpoint-1")
    flip(tmp_path / "checkpoint-1" / "trainer_state.json", random.Random(0))
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole"):
        read_newest(tmp_path, strict=False)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", "", ".", "a\0", "a\nb", "\ud800"]
)
def test_a_manifest_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    """A manifest may be right by its digest and still name files elsewhere: it is refused."""
    from onward.checkpoint.manifest import FileRecord, manifest_bytes, read_manifest

    facts = {"run": "a", "updates": 1, "micro_steps": 0}
    text = manifest_bytes({name: FileRecord(0, "")}, facts)
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="no file of its folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"format": 1}', "\x00", "{" * 50, "nan"]
)
def test_a_manifest_of_another_form(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is (damaged|not of the format)"):
        read_checkpoint(tmp_path)


def test_json_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest over 16 MiB, or a state over its limit, is not read."""
    checkpoint(1).packed().write(tmp_path)
    monkeypatch.setattr("onward.checkpoint.checkpoint._LARGEST", 100)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json has more than"):
        read_checkpoint(tmp_path)
    os.truncate(tmp_path / "manifest.json", (16 << 20) + 1)
    with pytest.raises(CheckpointError, match="not a regular file of at most 16 MiB"):
        read_checkpoint(tmp_path)


def test_a_manifest_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("file", [name for name in FILES if name != "manifest.json"])
def test_a_folder_in_the_place_of_a_file(file: str, tmp_path: Path) -> None:
    checkpoint(1).packed().write(tmp_path / "a")
    (tmp_path / "a" / file).unlink()
    (tmp_path / "a" / file).mkdir()
    with pytest.raises(CheckpointError, match=rf"{file} is not a regular file"):
        read_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("pickled", ["optimizer.pt", "rng_state.pth", "pytorch_model.bin"])
def test_a_pickle_is_not_read(pickled: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    marker = tmp_path / "ran"
    (folder / pickled).write_bytes(f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode())
    for place in (folder, tmp_path):
        with pytest.raises(CheckpointError, match=f"{pickled} is a pickle"):
            read_newest(place, strict=False)
    assert not marker.exists()


def test_checkpoints_of_two_runs(tmp_path: Path) -> None:
    checkpoint(1, run="a").packed().write(tmp_path / "checkpoint-1")
    checkpoint(9, run="b").packed().write(tmp_path / "checkpoint-9")
    with pytest.raises(CheckpointError, match="holds checkpoints of 2 runs; fix: name one"):
        read_newest(tmp_path, strict=False)
    assert is_whole(read_newest(tmp_path / "checkpoint-1", strict=False)[1])


def test_a_state_that_was_never_written(tmp_path: Path) -> None:
    """Files whose sums are right, with a state that no save would write."""
    states = [
        {},
        {"tied_weights": {}, "state": {"$nothing": 1}, "model_extra_state": {}},
        {"tied_weights": {"a": "b"}, "state": {}, "model_extra_state": {}},
        {"tied_weights": {}, "state": {"$tensor": "absent"}, "model_extra_state": {}},
        {"tied_weights": {}, "state": {"$number": ["O", 1]}, "model_extra_state": {}},
        {"tied_weights": {}, "state": {"$dtype": "load"}, "model_extra_state": {}},
        {"tied_weights": {"weight": "bias"}, "state": {}, "model_extra_state": {}},
        {"tied_weights": {"a": ["weight"]}, "state": {}, "model_extra_state": {}},
        {"tied_weights": {}, "state": [], "model_extra_state": {}},
        {"tied_weights": {}, "state": {}, "model_extra_state": []},
        {"tied_weights": {}, "state": {}, "model_extra_state": {"weight": 1}},
    ]
    for number, state in enumerate(states):
        packed = checkpoint(1).packed()
        packed.texts["trainer_state.json"] = json.dumps(state)  # type: ignore[index]
        path = tmp_path / str(number)
        packed.write(path)
        with pytest.raises(CheckpointError, match=r"trainer_state\.json") as error:
            read_checkpoint(path)
        assert str(error.value).isprintable() and len(str(error.value)) < 500


def test_a_manifest_of_numbers_that_json_lacks(tmp_path: Path) -> None:
    checkpoint(1).packed().write(tmp_path)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    body["facts"]["more"] = float("nan")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(body, indent=2) + "\n")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_checkpoint(tmp_path)
