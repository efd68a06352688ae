"""Checkpoints and records of runs that a stranger may have made, their sums right in most cases."""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.files.json_trees import changed_text
from fuzz.files.judge import Format
from fuzz.files.models import check_tensors, raw
from fuzz.files.places import changed_place, lures_of
from fuzz.files.tensor_files import changed_file

import onward
from onward.checkpoint import Checkpoint, ModelState, read_checkpoint
from onward.errors import CheckpointError, OnwardError
from onward.recipes.options import FinetuneConfig
from onward.recipes.run_folder import check_same_run, read_record

WEIGHTS, TENSORS, STATE = "model.safetensors", "optimizer.safetensors", "trainer_state.json"
MANIFEST, RECORD = "manifest.json", "run_config.json"
_ODD = (ValueError, RecursionError, AttributeError, TypeError, KeyError)  # no manifest to sign
FACTS = {"run": "a", "updates": 2, "micro_steps": 0}
# values that an encoded state gives a meaning to
LURES: tuple[Any, ...] = (
    ("$tensor", "absent"), ("$float", "1"), ("$dtype", "load"), ("$device", "planted:0"),
    {"$set": [[]]},
    {"$set": [1, 1]}, {"$number": ["O", 1]}, {"$number": ["float32", {"$bytes": "AA=="}]},
    {"$number": ["int8", 10**6]}, {"$number": ["V1000000000", 0]}, {"$number": ["float64", "nan"]},
    {"$bytes": "%%%"}, {"$bytes": "A" * 9999}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[{}, 1]]},
    {"$dict": [[[], 1]]}, {"$counter": [["a", "b"]]}, {"$tuple": None}, {"$tensor": "state.x"},
    {"$array": "state.x"}, {"$array": "state.low"}, {"$device": "cuda:7"}, {"$dtype": "Tensor"},
    {"$dtype": "float32"}, {"$number": ["datetime64", 1]}, {"$number": [["a", "b"], 1]},
    {"$device": ""}, {"$device": "meta"}, {"$tuple": "abc"}, {"$float": "nan", "more": 1}, {"$": 1},
    {"$number": "ab"}, {"$tensor": []}, {"$tensor": {"a": 1}}, {"$dict": {"ab": 1}},
    {"$set": "aab"},
)  # fmt: skip


def plain(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What an encoded state means, read by a decoder of the tests' own. Raises any exception for a
    state that means nothing."""
    if isinstance(tree, list):
        return [plain(x, tensors) for x in tree]
    if not isinstance(tree, dict):
        return tree
    if not any(k.startswith("$") for k in list(tree)[:1]):
        return {k: plain(v, tensors) for k, v in tree.items()}
    ((kind, held),) = tree.items()
    match kind:
        case "$float":
            return {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}[held]
        case "$tensor":
            return tensors[held]
        case "$array":
            return tensors[held].numpy()
        case "$number":
            return np.dtype(held[0]).type(plain(held[1], tensors))
        case "$tuple":
            return tuple(plain(x, tensors) for x in held)
        case "$set":
            return {plain(x, tensors) for x in held}
        case "$dict" | "$counter":
            made = [(plain(k, tensors), plain(v, tensors)) for k, v in held]
            if len(dict(made)) != len(made):
                raise ValueError("a key twice")
            return dict(made) if kind == "$dict" else Counter(dict(made))
        case "$bytes":
            return base64.b64decode(held, validate=True)
        case "$dtype":
            return getattr(torch, held)
        case "$device":
            return torch.device(held)
    raise ValueError(kind)


def alike(a: Any, b: Any) -> bool:
    """Whether two states are equal to the bit, NaN to NaN, in type too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b) or (a != a and b != b)


def signed(folder: Path) -> None:
    """Makes the sums of a checkpoint's manifest right for the files that are there."""
    body = json.loads((folder / MANIFEST).read_bytes())
    for name in body["files"]:
        path = folder / name
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            body["files"][name] = {"bytes": len(content), "sha256": sha256}
    write_manifest(folder, body)


def write_manifest(folder: Path, body: Any) -> None:
    body.pop("sha256", None)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(body, indent=2) + "\n")


def change_checkpoint(folder: Path, draw: random.Random, outside: Path) -> str:
    """Changes one or two files of a checkpoint, and in most cases makes its sums right again."""
    said: list[str] = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        kind = draw.choice(["place", "manifest", "state", "state", "state", "tensors", "tensors"])
        said.append(kind)
        if kind == "place":
            said[-1] += (
                f" {changed_place(folder, [WEIGHTS, TENSORS, STATE, MANIFEST], draw, outside)}"
            )
            break
        if kind == "manifest":
            path = folder / MANIFEST
            names = [*lures_of(outside, WEIGHTS), 10**30, "a" * 64]
            path.write_bytes(changed_text(path.read_bytes(), draw, names))
            if draw.random() < 0.8:
                with contextlib.suppress(*_ODD):
                    write_manifest(folder, json.loads(path.read_bytes()))
            return ", ".join(said)
        if kind == "state":
            path = folder / STATE
            path.write_bytes(changed_text(path.read_bytes(), draw, LURES))
        else:
            path = folder / draw.choice([WEIGHTS, TENSORS])
            path.write_bytes(changed_file(path.read_bytes(), draw))
    if draw.random() < 0.9 and (folder / MANIFEST).is_file():
        with contextlib.suppress(*_ODD, OSError):
            signed(folder)
    return ", ".join(said)


# ---- a checkpoint by itself


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    state = {
        "x": torch.arange(4.0), "low": torch.ones(2, dtype=torch.bfloat16), "betas": (0.9, 0.99),
        "nan": float("nan"), "inf": -float("inf"), "words": np.arange(3, dtype=np.uint32),
        "n": np.float32(0.5), "groups": [{"lr": 1e-3, "more": None}], "flag": True, "raw": b"abc",
        "by number": {1: "a", (2, 3): [1.5]}, "set": {1, 2}, "count": Counter({"a": 2}),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "text": "\u00e9", "big": 2**80,
    }  # fmt: skip
    made = Checkpoint(ModelState.of(model), state, FACTS, {"config.json": "{}\n"})
    folder.rmdir()
    made.packed().write(folder)


def check_checkpoint(folder: Path, found: Checkpoint) -> str | None:
    wrong = check_tensors((folder / WEIGHTS).read_bytes(), found.model.tensors)
    if wrong is not None:
        return wrong
    from safetensors.torch import load_file

    tree, tensors = json.loads((folder / STATE).read_bytes()), load_file(folder / TENSORS)
    wrong = check_tensors((folder / TENSORS).read_bytes(), tensors)
    if wrong is not None:
        return wrong
    try:
        want = plain(tree["state"], tensors), plain(tree["model_extra_state"], tensors)
    except Exception as error:
        return f"a state is loaded that means nothing: {error!r}"
    if (
        not alike(want, (found.state, found.model.extra))
        or tree["tied_weights"] != found.model.tied
    ):
        return "another state"
    if dict(found.facts) != json.loads((folder / MANIFEST).read_bytes())["facts"]:
        return "other facts"
    return None


# ---- a Trainer that resumes


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.drop = torch.nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(torch.relu(self.one(x)))) + self.seen


class _Owner:
    """A Trainer, the checkpoint that it wrote, and its state at that time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = _Net()
        groups: list[Any] = [{"params": "*.bias", "weight_decay": 0.0}]
        self.counter = _Counter()
        self.trainer: Any = onward.Trainer(
            model,
            onward.optim.AdamW(lr=1e-3, groups=groups),
            loss_fn=torch.nn.functional.mse_loss,
            options={
                "gradient_accumulation_steps": 2, "ema_decay": 0.9,
                "loss_spikes": "warn", "seed": 3,
            },
        )  # fmt: skip
        self.trainer.register_for_checkpointing(self.counter)
        for _ in range(5):  # two updates and half a window
            self.step()
        self.state = self.trainer.state_dict()

    def step(self) -> None:
        x = torch.linspace(0.0, 1.0, 12).reshape(4, 3)
        self.trainer.train_step(x, torch.ones(4, 2))


class _Counter:
    def __init__(self) -> None:
        self.n = 3

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or type(state.get("n")) is not int:
            raise OnwardError("the counter's state is another")
        self.n = state["n"]


@functools.cache
def _owner() -> _Owner:
    return _Owner()


def make_resume(folder: Path) -> None:
    owner = _owner()
    path = owner.trainer.save(folder.parent / "saved")
    for each in path.iterdir():
        each.rename(folder / each.name)


def load_resume(folder: Path) -> Any:
    """Resumes, and takes a step with what was resumed. A refusal changes nothing; the Trainer is as
    it was before either way."""
    owner = _owner()
    trainer = owner.trainer
    before = trainer.state_dict()
    try:
        trainer.resume(folder)
    except OnwardError:
        assert alike(trainer.state_dict(), before), "a state that is refused has changed something"
        raise
    found = trainer.state_dict()
    try:
        with contextlib.suppress(OnwardError):  # what a step refuses is not the file's any more
            owner.step()
            owner.step()
    finally:
        owner.counter.n = 3
        trainer.load_state_dict(copy.deepcopy(owner.state))
    return found


def check_resume(folder: Path, found: dict[str, Any]) -> str | None:
    from safetensors.torch import load_file

    held = read_checkpoint(folder)
    wrong = check_checkpoint(folder, held)
    if wrong is not None:
        return wrong
    weights = load_file(folder / WEIGHTS)
    if not all(alike(found["model"][k], t) for k, t in weights.items()):
        return "another weight"
    for key in ("optimizer", "param_groups", "counts", "updates", "samples", "micro_steps", "seed"):
        if not alike(_sorted(found[key]), _sorted(held.state[key])):
            return f"another {key}"
    return None


def _sorted(x: Any) -> Any:
    """A state without the order of its dicts."""
    if isinstance(x, dict):
        return {k: _sorted(x[k]) for k in sorted(x)}
    return list(map(_sorted, x)) if isinstance(x, list) else x


# ---- the record of a run


def _record() -> dict[str, Any]:
    known = vars(FinetuneConfig())
    options = {k: v for k, v in known.items() if isinstance(v, int | float | str | None)}
    return {
        "options": options, "texts": [{"sha256": "0" * 64, "name": "x", "bytes": 3}] * 2,
        "blocks_sha256": "1" * 64, "model_config_sha256": "2" * 64, "versions": {"torch": "2"},
    }  # fmt: skip


def make_record(folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps(_record(), indent=2))


def change_record(folder: Path, draw: random.Random, outside: Path) -> str:
    path = folder / RECORD
    if draw.random() < 0.1:
        return changed_place(folder, [RECORD], draw, outside)
    path.write_bytes(changed_text(path.read_bytes(), draw))
    return "changed record"


def load_record(folder: Path) -> dict[str, Any]:
    """The record, compared with that of the same command."""
    found, valid = read_record(folder), _record()
    for before, now in ((found, valid), (valid, found)):
        with contextlib.suppress(OnwardError):
            check_same_run(before, now, folder)
    return found


def check_record(folder: Path, found: dict[str, Any]) -> str | None:
    want = json.loads((folder / RECORD).read_bytes())
    return None if repr(found) == repr(want) else "another record"


FORMATS: dict[str, Format] = {
    "checkpoint": Format(
        make_checkpoint, change_checkpoint, read_checkpoint, check_checkpoint, (CheckpointError,)
    ),
    "resume": Format(make_resume, change_checkpoint, load_resume, check_resume, (OnwardError,)),
    "record": Format(make_record, change_record, load_record, check_record, (OnwardError,)),
}  # fmt: skip
