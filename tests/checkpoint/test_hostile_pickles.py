"""Hostile pickles: no way into Onward runs one, whatever it is made of and however it is packed.

Each payload makes a file where torch reads it without `weights_only`, which is tried too: one that
does nothing would prove nothing.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import io
import itertools
import marshal
import operator
import os
import pickle  # noqa: TID251  # what is to be refused is written with it
import re
import runpy
import shutil
import subprocess
import tarfile
import timeit
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_faults import checkpoint

from onward.checkpoint import read_checkpoint
from onward.checkpoint.disk import StagedFolder
from onward.errors import CheckpointError
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.start_model import build_model, check_model_name, load_model_config
from onward.train.checkpointing import read_newest

PACKAGE = Path(__file__).parents[2] / "src" / "onward"
MARKER = "ran"  # in the working directory
COMMAND = f"touch {MARKER}"
CODE = f"open({MARKER!r}, 'w').close()"


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """Stands for the function that it is unpickled as."""


class SetsState:
    """Has a `__setstate__` that does something."""

    def __init__(self) -> None:
        self.command = COMMAND

    def __setstate__(self, state: Any) -> None:
        os.system(state["command"])  # noqa: S605


def module(name: str) -> Calls:
    return Calls(importlib.import_module, name)


def named(of: str, name: str) -> Any:
    """A function of a library's own, which its type hints do not know."""
    return getattr(importlib.import_module(of), name)


SYSTEM = Calls(os.system, COMMAND)
INNER = pickle.dumps(SYSTEM, 2)
LOAD = torch.load  # noqa: TID251  # what is to be refused
TENSOR = torch.zeros(1).__reduce_ex__(2)[1]  # storage, offset, size, stride, grad, hooks
TEXT = b"X" + len(COMMAND).to_bytes(4, "little") + COMMAND.encode()

OBJECTS: dict[str, Any] = {
    "os.system": SYSTEM,
    "eval": Calls(eval, CODE),
    "exec": Calls(exec, CODE),
    "import": Calls(eval, f"__import__('os').system({COMMAND!r})"),
    "open": Calls(open, MARKER, "w"),
    "subprocess": Calls(subprocess.call, ["touch", MARKER]),
    "getattr": Calls(Calls(getattr, module("os"), "system"), COMMAND),
    "a path's method": Calls(Path.touch, Path(MARKER)),
    "mkdir": Calls(os.mkdir, MARKER),
    "partial": Calls(functools.partial(os.system, COMMAND)),
    "reduce": Calls(functools.reduce, os.mkdir, [MARKER, 0o700]),
    "map": Calls(list, Calls(map, os.system, [COMMAND])),
    "starmap": Calls(list, Calls(itertools.starmap, os.system, [(COMMAND,)])),
    "methodcaller": Calls(operator.methodcaller("system", COMMAND), module("os")),
    "timeit": Calls(timeit.timeit, CODE, "pass", timeit.default_timer, 1),
    "runpy": Calls(runpy.run_path, "payload.py"),
    "marshal": Calls(exec, Calls(marshal.loads, marshal.dumps(compile(CODE, "x", "exec")))),
    "a class's __setstate__": SetsState(),
    "a pickle in a pickle": Calls(pickle.loads, INNER),
    "torch.load": Calls(LOAD, io.BytesIO(INNER), None, module("pickle")),
    "_load_from_bytes": Calls(torch.storage._load_from_bytes, INNER),
    "_load_from_bytes twice": Calls(
        torch.storage._load_from_bytes,
        pickle.dumps(Calls(torch.storage._load_from_bytes, INNER), 2),
    ),
    "numpy.load": Calls(np.load, io.BytesIO(INNER), None, True),
    "numpy's scalar": Calls(np.float64(1).__reduce__()[0], np.dtype("O"), SYSTEM),
    "an array of objects": np.array([SYSTEM, None], dtype=object),
    "a tensor's hooks": Calls(named("torch._utils", "_rebuild_tensor_v2"), *TENSOR[:5], SYSTEM),
    "a tensor's type": Calls(
        named("torch._tensor", "_rebuild_from_type_v2"), os.system, torch.Tensor, (COMMAND,), {}
    ),
    "a parameter's state": Calls(
        named("torch._utils", "_rebuild_parameter_with_state"),
        torch.zeros(1),
        True,
        OrderedDict(),
        SYSTEM,
    ),
    "within a state": OrderedDict(a=torch.zeros(2), b={"c": [1, (SYSTEM,)]}),
    "copyreg": Calls(named("copyreg", "_reconstructor"), SetsState, object, SYSTEM),
}
STREAMS: dict[str, bytes] = {
    "GLOBAL": f"cposix\nsystem\n(S'{COMMAND}'\ntR.".encode(),
    "GLOBAL of Python 2": f'c__builtin__\neval\n(S"{CODE}"\ntR.'.encode(),
    "INST": f"(S'{COMMAND}'\niposix\nsystem\n.".encode(),
    "OBJ": f"(cposix\nsystem\nS'{COMMAND}'\no.".encode(),
    "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + TEXT + b"\x85R.",
    "MEMOIZE": b"\x80\x04\x8c\x06system\x940\x8c\x05posix\x94h\x00\x93" + TEXT + b"\x85R.",
    "a frame": b"\x80\x04\x95\x01\0\0\0\0\0\0\0" + INNER[2:],
    "BUILD": b"\x80\x02cfunctools\npartial\ncbuiltins\nlen\n\x85R(cposix\nsystem\n" + TEXT
    + b"\x85}Ntb)R.",
    "NEWOBJ": b"\x80\x02cbuiltins\nlist\ncbuiltins\nmap\ncposix\nsystem\n]" + TEXT
    + b"a\x86\x81\x85R.",
    "EXT": b"\x80\x02\x82\x01" + TEXT + b"\x85R.",
    "PERSID": INNER[:-1] + b"Q.",
    "a second pickle": b"\x80\x02}cposix\nsystem\n" + TEXT + b"\x85R0.",
}  # fmt: skip


def streams() -> dict[str, bytes]:
    return {**{name: pickle.dumps(made, 2) for name, made in OBJECTS.items()}, **STREAMS}


def archive(stream: bytes) -> bytes:
    """torch's archive whose data are this pickle."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({}, plain)
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(packed, "w") as made:
        for name in whole.namelist():
            made.writestr(name, stream if name.endswith("data.pkl") else whole.read(name))
    return packed.getvalue()


def legacy(stream: bytes) -> bytes:
    """The file of torch's older versions."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    first = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, facts)
    return b"".join([*(pickle.dumps(each, 2) for each in first), stream, pickle.dumps([], 2)])


def tar(stream: bytes) -> bytes:
    """The file of torch's oldest versions."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as made:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(stream)
            made.addfile(member, io.BytesIO(stream))
    return packed.getvalue()


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "archive": archive, "legacy": legacy, "tar": tar, "bare": bytes,
}  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory; an environment that asks torch for the unsafe way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    Path("payload.py").write_text(CODE)
    copyreg.add_extension("posix", "system", 1)
    yield
    copyreg.remove_extension("posix", "system", 1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 without weights."""
    from tiny import gpt2

    folder = tmp_path_factory.mktemp("model")
    gpt2(width=8).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder


def test_there_are_enough() -> None:
    assert len(streams()) >= 40


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore")  # torch's, of its older formats
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", streams())
def test_a_payload_runs_where_nothing_is_refused(payload: str, form: str) -> None:
    stream = streams()[payload]
    with contextlib.suppress(Exception):
        if form == "bare":
            pickle.loads(stream)
        else:
            Path("file").write_bytes(FORMS[form](stream))
            LOAD("file", weights_only=False)
    assert Path(MARKER).exists()


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore")  # torch's, of newer protocols
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", streams())
def test_weights_of_a_model(payload: str, form: str, model_folder: Path) -> None:
    """Refused without being opened; with `--allow_pickle` read with `weights_only`, and refused."""
    folder = Path("model")
    shutil.copytree(model_folder, folder)
    weights = FORMS[form](streams()[payload])
    (folder / "pytorch_model.bin").write_bytes(weights)
    with pytest.raises(InputError, match=r"are a pickle .*save_pretrained, or add --allow_pickle"):
        check_model_name(FinetuneConfig(model_name_or_path="model"))
    allowed = FinetuneConfig(model_name_or_path="model", allow_pickle=True)
    with pytest.raises(InputError, match="the weights of model 'model'") as error:
        check_model_name(allowed)
        build_model(allowed, load_model_config(allowed))
    assert "save_pretrained" in str(error.value)
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=r"model\.safetensors' is "):
        check_model_name(allowed)
    assert not Path(MARKER).exists()


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", streams())
def test_checkpoints(payload: str, form: str) -> None:
    """Checkpoints of another library are refused, and so are ones that a stranger wrote, with sums
    that are right: pickles under the names of Onward's own files. Others are not read."""
    content = FORMS[form](streams()[payload])
    for number, name in enumerate(
        ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt",
         "pytorch_model.bin", "rng_state_0.pth", "model.ckpt", "__0_0.distcp", "state.pkl")
    ):  # fmt: skip
        foreign = Path(f"foreign-{number}", "checkpoint-3")
        foreign.mkdir(parents=True)
        (foreign / name).write_bytes(content)
        (foreign / "trainer_state.json").write_text("{}")
        for folder in (foreign, foreign.parent):
            with pytest.raises(CheckpointError, match=r"is a pickle.*fix: load its weights"):
                read_newest(folder, strict=False)
    checkpoint(1).packed().write(Path("whole"))
    for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        with StagedFolder(Path(f"made-{name}")) as staged:
            for path in Path("whole").iterdir():
                if path.name != "manifest.json":
                    staged.write(path.name, [content if path.name == name else path.read_bytes()])
            staged.commit({"run": "a", "updates": 1, "micro_steps": 0})
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(Path(f"made-{name}"))
    Path("whole", "optimizer.pt").write_bytes(content)  # beside: not looked at
    read_checkpoint(Path("whole"))
    assert not Path(MARKER).exists()


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore")  # transformers', of states that are not there
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", streams())
def test_a_checkpoint_for_transformers_trainer(payload: str, form: str) -> None:
    """What transformers' own code reads for `Trainer.train(resume_from_checkpoint=...)`."""
    trainer = transformers_trainer()
    folder = Path("checkpoint-1")
    folder.mkdir()
    names = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin")
    for name in names:
        (folder / name).write_bytes(FORMS[form](streams()[payload]))
    refused = 0
    for read in (
        trainer._load_optimizer_and_scheduler, trainer._load_rng_state, trainer._load_scaler,
        trainer._load_from_checkpoint,
    ):  # fmt: skip
        try:
            read(str(folder))
        except Exception:
            refused += 1
    assert refused >= 3  # without CUDA there is no scaler to load
    assert not Path(MARKER).exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["weights", "optimizer.pt", "rng_state.pth", "pytorch_model.bin"])
def test_the_ways_in_would_run_it_without_weights_only(
    way: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch reads everything, the payload runs: what is tried above does come to torch."""

    def unsafe(*arguments: Any, **named: Any) -> Any:
        return LOAD(*arguments, **{**named, "weights_only": False})

    folder = Path("model")
    shutil.copytree(model_folder, folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"):
        (folder / name).write_bytes(archive(INNER))
    allowed = FinetuneConfig(model_name_or_path="model", allow_pickle=True)
    trainer = transformers_trainer()
    monkeypatch.setattr(torch, "load", unsafe)
    with contextlib.suppress(Exception):
        match way:
            case "weights":
                build_model(allowed, load_model_config(allowed))
            case "optimizer.pt":
                trainer._load_optimizer_and_scheduler(str(folder))
            case "rng_state.pth":
                trainer._load_rng_state(str(folder))
            case _:
                trainer._load_from_checkpoint(str(folder))
    assert Path(MARKER).exists()


@functools.cache
def transformers_trainer() -> Any:
    import tempfile

    from tiny import gpt2
    from transformers import TrainingArguments

    from onward.integrations.transformers import Trainer

    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
    trainer = Trainer(gpt2(width=8), arguments)
    trainer.create_optimizer_and_scheduler(1)
    return trainer


def test_members_that_nobody_asked_for(model_folder: Path) -> None:
    """An archive of plain weights, with pickles beside them: the weights are read, and no more."""
    from tiny import gpt2

    folder = Path("model")
    shutil.copytree(model_folder, folder)
    torch.save(gpt2(width=8).state_dict(), folder / "pytorch_model.bin")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "a") as packed:
        for name in ("data.pkl", "archive/data.pkl", "pytorch_model/extra.pkl", "../data.pkl"):
            packed.writestr(name, INNER)
    config = FinetuneConfig(model_name_or_path="model", allow_pickle=True)
    with contextlib.suppress(InputError):
        build_model(config, load_model_config(config))
    assert not Path(MARKER).exists()


UNSAFE = re.compile(
    r"torch\.load\((?!weights_only=True\) in your own code)|jit\.load|pickle\.loads?\(|Unpickler\(|"
    r"allow_pickle=True|weights_only=False|trust_remote_code=True|shell=True|yaml\.load|"
    r"os\.system\(|marshal\.loads"
)


def test_the_package_reads_no_pickle() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if UNSAFE.search(line)
    ]
    assert not found
