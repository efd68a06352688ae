"""Broken weights, and folders that ask for more than weights: one line that names the file and the
cause, from bytes that are bounded, and nothing outside of the folder is read."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_faults import checkpoint
from safetensors.torch import load_file, save_file

from onward.checkpoint import read_checkpoint, tensor_file_fault
from onward.cli import main
from onward.errors import CheckpointError

Refused = Callable[..., str]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 52\n" % (b"0" * 64)
HTML = b"<!DOCTYPE html>\n<html><title>Not Found</title></html>"
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def tensors(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    """A safetensors file with this header, JSON or bytes; length: what it says of itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changed: Any) -> dict[str, Any]:
    return {"a": {**F32, **changed}}


# the content of a file of weights, and what must be said of it
BROKEN: dict[str, tuple[bytes, str]] = {
    "a pointer of git-lfs": (LFS, "is a git-lfs pointer in the place of the file.*git lfs pull"),
    "a web page": (HTML, "is a web page or XML.*download the file itself"),
    "a page after blank lines": (b"\n\n  <html>", "is a web page or XML"),
    "an XML error": (b'<?xml version="1.0"?><Error/>', "is a web page or XML"),
    "a JSON error": (b'{"error": "Repository not found"}', "does not begin with a header"),
    "a text": (b"Entry not found", "does not begin with a header"),
    "nothing": (b"", "is empty"),
    "7 bytes": (b"\x08\0\0\0\0\0\0", "does not begin with a header"),
    "zeros": (bytes(4096), "is malformed"),
    "a pickle": (b"\x80\x02cposix\nsystem\n.", "is a pickle under the name"),
    "an archive": (b"PK\x03\x04" + bytes(99), "is a pickle under the name"),
    "GGUF": (b"GGUF" + bytes(99), "is a GGUF file"),
    "HDF5": (b"\x89HDF\r\n" + bytes(99), "is an HDF5 file"),
    "cut in the header": (tensors(F32)[:20], "is cut short: 20 bytes, with a header of"),
    "cut in a tensor": (tensors({"a": F32}, bytes(7)), "is cut short: its tensors take 8 .* has 7"),
    "cut before all": (tensors({"a": F32}, b""), "is cut short: its tensors take 8 .* has 0"),
    "longer": (tensors({"a": F32}, bytes(9)), "has extra bytes: its tensors take 8 .* has 9"),
    "a header of 100 MB": (tensors({"a": F32}, length=10**8), "is cut short: .* of 100000000"),
    "a header over 100 MB": (tensors({"a": F32}, length=10**8 + 1), "not begin with a header"),
    "a header of 2**63": (tensors({"a": F32}, length=2**63), "does not begin with a header"),
    "overlapping": (
        tensors({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "the bytes of tensor `b` overlap",
    ),
    "a gap": (
        tensors({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)),
        "the bytes of tensor `b` overlap another's, or leave a gap",
    ),
    "beyond the file": (tensors(entry(data_offsets=[100, 108])), "the bytes of tensor `a`"),
    "backwards": (tensors(entry(data_offsets=[8, 0])), "the bytes of tensor `a`"),
    "a tensor twice": (
        tensors(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2)),
        "has the tensor 'a' twice",
    ),
    "a field twice": (
        tensors(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "malformed .*duplicate field `dtype`",
    ),
    "a negative size": (tensors(entry(shape=[-2])), "malformed .*integer `-2`"),
    "a negative offset": (tensors(entry(data_offsets=[-8, 0])), "malformed .*integer `-8`"),
    "a size that is NaN": (tensors(entry(shape=[float("nan")])), "malformed .*invalid JSON"),
    "a size that is a text": (tensors(entry(shape=["2"])), "malformed .*expected usize"),
    "an unknown dtype": (tensors(entry(dtype="F7")), "malformed .*unknown variant `F7`"),
    "another size than its bytes": (tensors(entry(shape=[3])), "shape does not fit its bytes"),
    "2**80 elements": (tensors(entry(shape=[2**40, 2**40])), "shape does not fit its bytes"),
    "no object": (tensors([1], b""), "does not begin with a header|malformed"),
    "no JSON": (tensors(b"{", b""), "malformed .*EOF"),
    "no UTF-8": (tensors(b'{"\xff": 1}', b""), "malformed .*UTF-8"),
    "deep": (tensors(b'{"a":' * 5000, b""), "malformed"),
    "a dtype that moves the cursor": (
        tensors(entry(dtype="F\x1b[2J\n7")), r"unknown variant `F\\x1b\[2J",
    ),
    "a tensor with the name of a field, cut": (
        tensors({"data_offsets": F32}, bytes(7)), "is cut short: its tensors take 8 .* has 7",
    ),
    "a note with the name of a field, cut": (
        tensors({"__metadata__": {"data_offsets": "abc"}, "a": F32}, b""), "is cut short",
    ),
    "metadata that is no text": (
        tensors({"__metadata__": {"a": 1}, "a": F32}), "malformed .*expected a string",
    ),
}  # fmt: skip


@pytest.fixture
def refused(
    tmp_path: Path,
    text_file: Path,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refused:
    """Changes a copy of a model's folder, and gives the one line with which `finetune` refuses it:
    exit status 2, and nothing written."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    monkeypatch.chdir(tmp_path)

    def run(change: Callable[[Path], Any], *options: str) -> str:
        change(folder)
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        words = ["--model", "model", "--train_file", str(text_file), "--block_size", "32"]
        assert main(["finetune", *words, "--engine", "torch", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("onward finetune: error: ") and "; fix: " in line
        assert "Traceback" not in line and len(line) < 500
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return run


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_of_a_model(name: str, refused: Refused) -> None:
    content, words = BROKEN[name]
    line = refused(lambda folder: (folder / "model.safetensors").write_bytes(content))
    assert "'model/model.safetensors' " in line
    found(words, line)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Once as they lie there, where sizes and sums find them, and once as a stranger writes them,
    with sums that are right."""
    from onward.checkpoint.disk import StagedFolder

    content, words = BROKEN[name]
    whole, made = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    checkpoint(1).packed().write(whole)
    with StagedFolder(made) as staged:
        for path in whole.iterdir():
            if path.name != "manifest.json":
                weights = path.name == "model.safetensors"
                staged.write(path.name, [content if weights else path.read_bytes()])
        staged.commit({"run": "a", "updates": 2, "micro_steps": 0})
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(made)
    assert str(error.value).startswith(f"{made / 'model.safetensors'} ")
    found(words, str(error.value))
    (whole / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is .*(damaged|fix: )"):
        read_checkpoint(whole)


def found(words: str, line: str) -> None:
    assert re.search(words, line), line


@pytest.mark.parametrize("name", ["lfs", "web page", "nothing"])
def test_broken_files_of_the_configuration(name: str, refused: Refused) -> None:
    content, words = {
        "lfs": (LFS, "is a git-lfs pointer"),
        "web page": (HTML, "is a web page"),
        "nothing": (b"", "is empty"),
    }[name]
    line = refused(lambda folder: (folder / "config.json").write_bytes(content))
    assert words in line and "cannot load the configuration" in line


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_too_large(file: str, refused: Refused) -> None:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / file).write_text("[")
        os.truncate(folder / file, (64 << 20) + 1)

    assert "it has more than 64 MiB" in refused(change)


def sharded(index: Any, files: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Weights in shards of these names, with this index in the place of one file."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        for name in files:
            save_file(weights, folder / name, {"format": "pt"})
        text = index if isinstance(index, str) else json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def of_shard(name: Any) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}


INDEXES: dict[str, tuple[Any, str]] = {
    "a missing shard": (of_shard("no.safetensors"), "names 'no.safetensors', which is not there"),
    "above": (of_shard("../x.safetensors"), "names '../x.safetensors', which is no file of its"),
    "absolute": (of_shard("/x.safetensors"), "names '/x.safetensors', which is no file of its"),
    "beneath": (of_shard("a/x.safetensors"), "which is no file of its folder"),
    "Windows": (of_shard("..\\x.safetensors"), "which is no file of its folder"),
    "a zero byte": (of_shard("x\0.safetensors"), "which is no file of its folder"),
    "a pickle": (of_shard("x.bin"), "names 'x.bin' as a shard, which is no .safetensors file"),
    "a number": (of_shard(1), "names 1 as a shard"),
    "no map": ({"metadata": {}}, "has no weight_map or no metadata"),
    "no metadata": ({"weight_map": {}}, "has no weight_map or no metadata"),
    "a list": ([1], "it is no JSON object"),
    "no JSON": ("{", "cannot load the weights"),
    "deep": ("[" * 100_000, "cannot load the weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_names_what_it_must_not(name: str, refused: Refused, tmp_path: Path) -> None:
    index, words = INDEXES[name]
    (tmp_path / "x.safetensors").write_bytes(b"a stranger must not have this read")
    line = refused(sharded(index, files=("a.safetensors",)))
    assert "'model/model.safetensors.index.json'" in line and words in line


def test_a_shard_is_looked_at_too(refused: Refused) -> None:
    def change(folder: Path) -> None:
        sharded(of_shard("a.safetensors"))(folder)
        (folder / "a.safetensors").write_bytes(LFS)

    assert "'model/a.safetensors' is a git-lfs pointer" in refused(change)


def test_a_tensor_in_two_shards(refused: Refused) -> None:
    names = {"transformer.wte.weight": "a.safetensors", "x": "b.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    line = refused(sharded(index, files=("a.safetensors", "b.safetensors")))
    assert "'model/b.safetensors' has the tensor '" in line and "so has 'a.safetensors'" in line


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a pickle": ({"transformers_weights": "adapter_model.bin"}, "which is no safetensors file"),
    "above": ({"transformers_weights": "../x.safetensors"}, "which is no file of its folder"),
    "absent": ({"transformers_weights": "x.safetensors"}, "which is not there"),
    "a kernel": ({"attn_implementation": "someone/kernel"}, "asks for code from the hub"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "are quantized"),
    "too many layers": ({"n_layer": 10**9}, "asks for 1000000000 of 'n_layer', more than 100000"),
    "too many labels": ({"num_labels": 10**9}, "asks for 1000000000 of 'num_labels'"),
    "many layers": ({"n_layer": 100_000}, "more than 1"),
    "a wide model": ({"n_embd": 2**20}, "config.json of 'model' asks for a model of"),
    "a wider model": ({"n_embd": 2**50}, "no model can be made of config.json of 'model'"),
    "many words": ({"vocab_size": 10**9}, "config.json of 'model' asks for a model of"),
    "no heads": ({"n_head": 0}, "config.json of 'model' (ZeroDivisionError"),
    "a text as a size": ({"n_embd": "\x1b[2J"}, "config"),
    "a list as a class": ({"model_type": []}, "cannot load the configuration"),
    "own code": (
        {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}},
        "cannot load the configuration",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_asks_for_more(name: str, refused: Refused, tmp_path: Path) -> None:
    changed, words = CONFIGS[name]
    (tmp_path / "x.safetensors").write_bytes(b"a stranger must not have this read")

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changed}))
        (folder / "adapter_model.bin").write_bytes(b"cposix\nsystem\n.")
        (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    assert words in refused(change)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a pickle", "a kernel", "quantized"])
def test_a_configuration_from_the_hub_that_asks_for_more(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    """What is looked at once transformers has read a configuration, wherever it was."""
    from onward.recipes.options import FinetuneConfig, InputError
    from onward.recipes.start_model import load_model_config

    changed, words = CONFIGS[name]
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(InputError, match=words):
        load_model_config(FinetuneConfig(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ['{"model": {"type": "\x1b"}}', "[]", '"x"', "[" * 5000, "{"])
def test_a_broken_tokenizer(content: str, file: str, refused: Refused) -> None:
    """The tokenizers library raises `Exception` itself."""
    line = refused(lambda folder: (folder / file).write_text(content))
    assert "cannot load a tokenizer from 'model'" in line or "has no vocabulary" in line
    assert line.isprintable()


@pytest.fixture
def on_the_hub(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, bytes]], Any]:
    """The files of a model as the hub's cache has them, with some changed, and the configuration
    and the checked weights of that name."""
    from onward.recipes.options import FinetuneConfig
    from onward.recipes.start_model import load_model_config, weight_files

    def load(changed: dict[str, bytes]) -> Any:
        commit = "0" * 40
        home = tmp_path / "hub" / "models--a-stranger--model"
        (home / "blobs").mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(commit)
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        files = {path.name: path.read_bytes() for path in model_folder.iterdir()} | changed
        for number, (name, content) in enumerate(files.items()):
            if content:
                (home / "blobs" / str(number)).write_bytes(content)
                (snapshot / name).symlink_to(f"../../blobs/{number}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        config = FinetuneConfig(model_name_or_path="a-stranger/model")
        return load_model_config(config), weight_files(config)

    return load


def test_weights_of_the_hub(on_the_hub: Callable[[dict[str, bytes]], Any]) -> None:
    _, (path,) = on_the_hub({})
    assert path.name == "model.safetensors"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../../../x.safetensors", "which is no file of its folder"),
        ("x.bin", "which is no .safetensors file"),
        ("b.safetensors", "names .b.safetensors., which is not there"),
    ],
)
def test_an_index_of_the_hub_that_names_what_it_must_not(
    name: str, words: str, on_the_hub: Callable[[dict[str, bytes]], Any], tmp_path: Path
) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"a stranger must not have this read")
    index = json.dumps(of_shard(name)).encode()
    with pytest.raises(ValueError, match=words):
        on_the_hub({"model.safetensors": b"", "model.safetensors.index.json": index})


def test_broken_weights_of_the_hub(on_the_hub: Callable[[dict[str, bytes]], Any]) -> None:
    twice = tensors(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2))
    with pytest.raises(ValueError, match=r"model\.safetensors' is malformed: .*'a' twice"):
        on_the_hub({"model.safetensors": twice})


def test_a_folder_with_an_adapter(refused: Refused) -> None:
    line = refused(lambda folder: (folder / "adapter_config.json").write_text("{}"))
    assert "holds an adapter" in line and "merge_and_unload" in line


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_links_out_of_the_folder(file: str, refused: Refused, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / file).rename(tmp_path / file)
        (folder / file).symlink_to(tmp_path / file)

    line = refused(change)
    assert f"'model/{file}' is a link to " in line and "outside of the model's folder" in line


def test_links_of_the_hubs_cache_are_followed(model_folder: Path, tmp_path: Path) -> None:
    from onward.recipes.model_folder import check_model_folder

    snapshot, blobs = tmp_path / "snapshots" / "0f", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model_folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    check_model_folder(snapshot, "here", allow_pickle=False)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../config")
    with pytest.raises(ValueError, match="outside of the model's folder"):
        check_model_folder(snapshot, "here", allow_pickle=False)


def test_a_pipe_does_not_block(refused: Refused) -> None:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        os.mkfifo(folder / "tokenizer.json")

    assert "'model/tokenizer.json' is not a regular file" in refused(change)


def stored(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return write


def test_weights_of_another_shape(refused: Refused) -> None:
    line = refused(stored(lambda w: w.update({"transformer.ln_f.bias": torch.zeros(33)})))
    assert "transformer.ln_f.bias is [33] in the file and [32] by config.json" in line


def test_weights_of_another_model(refused: Refused) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights.clear()
        weights["theirs"] = torch.zeros(1)

    assert "none of the weights of model 'model' has a name" in refused(stored(change))


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_floats(dtype: torch.dtype, refused: Refused) -> None:
    name = "transformer.ln_f.bias"
    line = refused(stored(lambda w: w.update({name: torch.zeros(32, dtype=dtype)})))
    assert f"{name} holds integers" in line


def test_missing_and_unexpected_weights_are_said(
    refused: Refused,
    tmp_path: Path,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from onward.recipes.options import FinetuneConfig
    from onward.recipes.start_model import build_model, load_model_config

    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["transformer.ln_f.bias"]
        weights["theirs"] = torch.zeros(1)

    stored(change)(tmp_path / "model")
    config = FinetuneConfig(model_name_or_path=str(tmp_path / "model"))
    build_model(config, load_model_config(config))
    said = capsys.readouterr().err
    assert "note: 1 weights are not in the model folder and start at random: transformer" in said
    assert "note: 1 weights in the model folder are not the model's, and are left out: the" in said


@pytest.mark.parametrize("option", [[], ["--allow_pickle"]], ids=["", "allow_pickle"])
def test_a_checkpoint_of_another_library_is_not_resumed_from(
    option: list[str], refused: Refused, tmp_path: Path
) -> None:
    """`--allow_pickle` is for weights alone."""

    def change(folder: Path) -> None:
        foreign = tmp_path / "theirs" / "checkpoint-3"
        foreign.mkdir(parents=True)
        (foreign / "optimizer.pt").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")

    line = refused(change, "--resume_from_checkpoint", "theirs", *option)
    assert "optimizer.pt is a pickle, which can run code" in line
    assert not (tmp_path / "ran").exists()


def test_a_header_costs_a_few_times_its_size(tmp_path: Path) -> None:
    """A header of 8 MB with 70,000 tensors, the last of which is there twice."""
    one = b'"%b%d":{"dtype":"F32","shape":[],"data_offsets":[%d,%d]}'
    entries = [one % (b"layer" * 10, i, 4 * i, 4 * i + 4) for i in range(70_000)]
    path = tmp_path / "model.safetensors"
    path.write_bytes(tensors(b"{" + b",".join([*entries, entries[-1]]) + b"}", bytes(280_000)))
    del entries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fault = tensor_file_fault(path)
    assert fault is not None and "twice" in fault.what
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KB
    assert sys.platform != "linux" or grown < (64 << 10)
