"""`offload_optimizer`: optimizer state in files or beside a GPU. It has the same bits as in memory,
where no more than a part of it is at a time, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Pair
from process_memory import measured, said_by
from torch import nn

import onward
from onward import OnwardError
from onward.execute import StateStore, state_store
from onward.execute.offloaded import bound_away
from onward.kernels import KernelArguments
from onward.plan import MemoryRegion, offloaded
from onward.train import update_road

pytestmark = [
    pytest.mark.usefixtures("captures_kept"),
    pytest.mark.skipif(sys.platform != "linux", reason="maps files as Linux does"),
]

loss_fn = nn.functional.mse_loss
X = torch.randn(5, 65, generator=torch.Generator().manual_seed(1))
Y = torch.randn(5, 33, generator=torch.Generator().manual_seed(2))
PART = 2048  # elements; the weight of 65 x 97 has three parts and a rest

TWINS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # by torch in eager PyTorch
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "AMSGrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, eps=1e-3),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.25),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
}
OURS: dict[str, Any] = {
    "centered": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "Lion": onward.optim.Lion(lr=0.01),
    "LAMB": onward.optim.LAMB(lr=0.01),
    "Adafactor": onward.optim.Adafactor(lr=0.01),
    "MuonWithAdamW": onward.optim.MuonWithAdamW(lr=0.01),
}


def net(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(65, 97), nn.Tanh(), nn.Dropout(dropout), nn.Linear(97, 33))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of few elements, and files for small tensors too."""
    monkeypatch.setattr(offloaded, "PART", PART)
    monkeypatch.setattr(state_store, "SMALL", 1)


def trainer_of(
    optimizer: Any, folder: Path | None = None, dropout: float = 0.2, **options: Any
) -> onward.Trainer:
    model = net(dropout)
    if callable(optimizer):
        optimizer = optimizer(model.parameters())
    if folder is not None:
        options |= {"offload_optimizer": "disk", "offload_dir": folder}
    return onward.Trainer(model, optimizer, loss_fn, options={"seed": 3, **options})


def run(trainer: Any, steps: int) -> list[float]:
    return [float(trainer.train_step(X + i, Y).loss) for i in range(steps)]


def differing(one: onward.Trainer, other: onward.Trainer) -> list[str]:
    """The names of weights and moments that are not equal bit by bit."""
    found = [{**s["model"], **s["optimizer"]} for s in (one.state_dict(), other.state_dict())]
    assert found[0].keys() == found[1].keys()
    return [name for name, x in found[0].items() if not torch.equal(x, found[1][name])]


def mapped_files(folder: Path) -> int:
    """The number of mappings of files in a folder that this process has."""
    return sum(f"{folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("name", TWINS)
def test_state_on_a_disk_is_that_of_eager_pytorch(name: str, small: None, tmp_path: Path) -> None:
    model = net(0.0)
    options: Any = {"offload_optimizer": "disk", "offload_dir": tmp_path}
    pair = Pair(model, TWINS[name], loss_fn, **options)
    for i in range(3):
        pair.step(X + i, Y)
    assert mapped_files(tmp_path), "the moments are files"


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (make, {}) for name, make in (TWINS | OURS).items()},
    "window": (TWINS["AdamW"], {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
    "bf16 state": (TWINS["AdamW"], {"optimizer_state": "bf16"}),
    "8bit state": (TWINS["AdamW"], {"optimizer_state": "8bit"}),
    "fp16": (TWINS["AdamW"], {"mixed_precision": "fp16"}),
    "bf16 and ema": (TWINS["SGD"], {"mixed_precision": "bf16", "ema_decay": 0.9}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_are_those_of_state_in_memory(name: str, small: None, tmp_path: Path) -> None:
    make, options = SETTINGS[name]
    held, away = trainer_of(make, **options), trainer_of(make, tmp_path, **options)
    assert run(held, 5) == run(away, 5)
    for trainer in (held, away):
        trainer.update()
    assert not differing(held, away)
    assert mapped_files(tmp_path) and not list(tmp_path.iterdir())
    sizes, other = held.plan.sizes, away.plan.sizes
    assert other[MemoryRegion.OFFLOADED] > 0 == sizes[MemoryRegion.OFFLOADED]
    assert sum(sizes.values()) == sum(other.values()), "the same bytes, elsewhere"


@pytest.mark.parametrize("build_of", ["native", "torch"])
def test_a_part_is_updated_as_within_the_whole(
    build_of: str, small: None, tmp_path: Path, build: Callable[[str], None]
) -> None:
    """Also by torch's kernels, which have scratch of the size of the gradient."""
    if build_of == "torch":
        build("0")
    options = {"max_grad_norm": 0.1}
    trainers = [trainer_of(TWINS["AdamW"], folder, **options) for folder in (None, tmp_path)]
    assert run(trainers[0], 3) == run(trainers[1], 3)
    assert not differing(*trainers)


def test_only_updates_of_large_parameters_are_made_in_parts(small: None, tmp_path: Path) -> None:
    """A norm, a mean over rows and a product of decays are of the whole."""
    counts: dict[str, list[int]] = {}
    for name in ("AdamW", "NAdam", "LAMB", "bf16 state", "8bit state"):
        make, options = SETTINGS[name]
        trainer = trainer_of(make, tmp_path, **options)
        run(trainer, 1)
        launches = [x for x in trainer.plan.launches if "Update" in x.op]
        counts[name] = sorted(len(offloaded.part_ranges(x)) for x in launches)
    in_parts, whole = [0, 0, 2, 4], [0, 0, 0, 0]
    assert {name: found for name, found in counts.items() if found != whole} == {
        "AdamW": in_parts,
        "bf16 state": in_parts,
        "8bit state": [0, 0, 0, 2],  # small parameters have 32 bits
    }
    trainer = trainer_of(TWINS["AdamW"], tmp_path)
    run(trainer, 1)
    assert trainer.plan.resident == 2 * 4 * PART


def test_a_window_that_a_checkpoint_ends_goes_on_in_memory_and_on_a_disk(
    small: None, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": 2}
    place = tmp_path / "files"
    place.mkdir()
    trainer = trainer_of(TWINS["AdamW"], place, **options)
    run(trainer, 3)
    trainer.save(tmp_path / "run")
    others = [trainer_of(TWINS["AdamW"], folder, **options) for folder in (None, place)]
    for other in others:
        other.resume(tmp_path / "run")
        assert other.micro_steps == 1
    losses = [run(each, 3) for each in (trainer, *others)]
    assert losses[0] == losses[1] == losses[2]
    assert not differing(trainer, others[0]) and not differing(trainer, others[1])
    others[1].load_state_dict(others[0].state_dict())
    trainer.save(tmp_path / "later", background=True)
    trainer.finish_saves()
    others[0].resume(tmp_path / "later")
    assert not differing(others[0], trainer)


def test_a_skipped_update_leaves_the_files_as_they_are(small: None, tmp_path: Path) -> None:
    trainer = trainer_of(TWINS["AdamW"], tmp_path)
    run(trainer, 2)
    before = trainer.state_dict()["optimizer"]
    assert trainer.train_step(X * float("inf"), Y).skipped
    after = trainer.state_dict()["optimizer"]
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_torch_goes_on_where_the_trainer_has_ended(small: None, tmp_path: Path) -> None:
    twin, make = net(0.0), TWINS["AdamW"]
    trainer = trainer_of(make, tmp_path, dropout=0.0)
    model, optimizer, other = trainer.model, trainer.optimizer, make(twin.parameters())
    run(trainer, 2)
    del trainer
    gc.collect()
    for i in range(4):
        for net_, each in ((model, optimizer), (twin, other)):
            if net_ is twin or i >= 2:
                each.zero_grad()
                loss_fn(net_(X + i), Y).backward()
                each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    del optimizer, each
    gc.collect()
    assert not mapped_files(tmp_path), "the files end with the tensors"


# ---- memory

PROGRAM = """
    import json, threading, time
    from process_memory import resident
    import torch, onward

    folder, place = sys.argv[1:3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Embedding(32768, 512)
    options = {"offload_optimizer": "disk", "offload_dir": folder} if folder else {}
    trainer = onward.Trainer(
        model, torch.optim.AdamW(model.parameters()), lambda y, t: y[t].square().mean(),
        options=options,
    )
    ids = torch.arange(64)

    def train():
        for _ in range(3):
            trainer.train_step(ids, ids)

    def watched(act):
        most, ended = [resident()], threading.Event()

        def watch():
            while not ended.is_set():
                most[0] = max(most[0], resident())
                time.sleep(0.0005)

        thread = threading.Thread(target=watch)
        thread.start()
        act()
        ended.set()
        thread.join()
        return most[0], resident()

    train()
    found = [watched(train), watched(lambda: trainer.save(place)), trainer.plan.peak]
    print(json.dumps(found))
"""


@pytest.mark.slow
@measured
def test_memory_falls_by_the_moments(tmp_path: Path) -> None:
    """What is resident, sampled within steps and a checkpoint: a table of 64 MiB, which has 128 MiB
    of moments."""
    table, part, noise = 4 * 32768 * 512, 2 * 4 * offloaded.PART, 8 << 20
    folders = {"": tmp_path / "one", str(tmp_path): tmp_path / "other"}
    held, away = (said_by(PROGRAM, f, str(save)) for f, save in folders.items())
    (held_most, held_still), (held_saving, _), peak = held
    (away_most, away_still), (away_saving, left), lower = away
    assert abs(held_still - away_still - 2 * table) < noise, (held, away)
    assert away_most < held_most - 2 * table + part + noise, (held, away)
    # a tensor at a time is read for a file, and none afterwards
    assert away_saving < held_saving - table + noise, (held, away)
    assert left < away_still + noise, away
    assert peak - lower == 2 * table - part


# ---- files


@contextmanager
def largest_file(nbytes: int) -> Generator[None]:
    """A context in which the system refuses larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_is_one_line_before_anything_has_changed(
    small: None, tmp_path: Path
) -> None:
    trainer = trainer_of(TWINS["AdamW"], tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with largest_file(20_000), pytest.raises(OnwardError) as error:
        run(trainer, 1)
    said = str(error.value)
    assert "has no room for" in said and str(tmp_path) in said and "fix: " in said
    assert "\n" not in said
    assert all(map(torch.equal, before, trainer.model.parameters()))
    held = trainer_of(TWINS["AdamW"])
    assert run(trainer, 3) == run(held, 3) and not differing(trainer, held), "it goes on"


def test_the_error_of_a_full_disk_says_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = StateStore(torch.device("cpu"), tmp_path)
    with pytest.raises(OnwardError, match=r"room for 1 MiB .*No space left on device, .* are free"):
        store.zeros((512, 512), torch.float32)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
        import torch, sys
        from pathlib import Path
        from onward.execute import StateStore

        store = StateStore(torch.device("cpu"), Path({str(tmp_path)!r}))
        held = store.zeros((512, 512), torch.float32).fill_(1.0)
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert not list(tmp_path.iterdir()), "no name, so that nothing has to be removed"
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_folders_that_take_no_files_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place, reason in ((tmp_path / "none", "No such file"), (file, "Not a directory")):
        with pytest.raises(OnwardError, match=rf"offload_dir .*{reason}.*fix: "):
            trainer_of(TWINS["AdamW"], place)


def test_a_folder_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no tmpfs")
    with caplog.at_level(logging.WARNING, "onward"):
        StateStore(torch.device("cpu"), tmp_path)
        assert not caplog.records
        StateStore(torch.device("cpu"), shared)
    [record] = caplog.records
    assert "in memory itself (tmpfs)" in record.getMessage()


def test_a_release_of_memory_that_is_no_file_changes_nothing(tmp_path: Path) -> None:
    """The advice would clear it."""
    store = StateStore(torch.device("cpu"), tmp_path)
    little, ours = store.zeros((4,), torch.float32), torch.full((1 << 20,), 3.0)
    large = store.zeros((1 << 20,), torch.float32)
    for x in (little, large):
        x.fill_(3.0)
    store.release([little, ours, large, large[5:7]])
    assert all(bool((x == 3.0).all()) for x in (little, ours, large))
    assert store.nbytes == large.nbytes
    del large, x
    assert store.nbytes == 0


# ---- where it means nothing, or another thing


def test_cpu_means_nothing_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onward"):
        trainer = trainer_of(TWINS["AdamW"], offload_optimizer="cpu")
    said = [r.getMessage() for r in caplog.records if "offload_optimizer" in r.getMessage()]
    assert len(said) == 1 and "changes nothing" in said[0]
    held = trainer_of(TWINS["AdamW"])
    assert run(trainer, 2) == run(held, 2)
    assert trainer.plan.sizes == held.plan.sizes


@pytest.mark.parametrize(
    "options",
    [
        {"offload_optimizer": "disk"},
        {"offload_dir": "/tmp"},
        {"offload_optimizer": "cpu", "offload_dir": "/tmp"},
    ],
)
def test_a_disk_needs_its_folder_and_the_folder_a_disk(options: dict[str, Any]) -> None:
    with pytest.raises(OnwardError, match=r"offload_dir go together.*fix: "):
        onward.TrainerOptions(**options)


def test_an_optimizer_that_makes_its_own_step_keeps_its_state(tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match="offload_optimizer='disk' is not supported where"):
        trainer_of(lambda ps: torch.optim.Rprop(ps), tmp_path)


def test_a_device_gets_its_state_in_a_stage_and_gives_it_back(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store for a GPU, with the CPU in the GPU's place: kernels are bound to one stage of the
    bytes of the largest part, and never to the state itself."""
    store = StateStore(torch.device("cpu"), is_staged=True)
    monkeypatch.setattr(update_road, "state_store", lambda *_: store)
    bound: list[KernelArguments] = []
    plain = KernelArguments.__init__

    def recorded(self: KernelArguments, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        bound.append(self)

    trainer = trainer_of(TWINS["AdamW"])
    monkeypatch.setattr(KernelArguments, "__init__", recorded)
    losses = run(trainer, 3)
    held = trainer._updates.state.tensors
    homes = {t.untyped_storage().data_ptr() for slots in held.values() for t in slots.values()}
    stage = store.stage(0)
    assert stage.nbytes == trainer.plan.resident == 2 * 4 * PART
    staged = [
        a for a in bound
        if any(t.untyped_storage().data_ptr() == stage.data_ptr() for t in a.outputs)
    ]  # fmt: skip
    assert len(staged) == 4 + 2 + 1 + 1, "each part of each parameter"
    for arguments in staged:
        touched = [t for t in (*arguments.inputs, *arguments.outputs) if t is not None]
        assert not homes & {t.untyped_storage().data_ptr() for t in touched}
    entry = trainer.optimizer.state[next(trainer.model.parameters())]
    assert set(entry) == {"step"}, "moments on another device are no state that torch could use"
    saved = trainer.optimizer.state_dict()["state"]
    monkeypatch.undo()
    other = trainer_of(TWINS["AdamW"])
    assert run(other, 3) == losses and not differing(trainer, other)
    want = other.optimizer.state_dict()["state"]
    assert all(torch.equal(saved[i][k], x) for i, each in want.items() for k, x in each.items())
    model, optimizer = trainer.model, trainer.optimizer
    del trainer
    gc.collect()
    loss_fn(model(X), Y).backward()
    optimizer.step()
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.state[next(model.parameters())])


def test_a_budget_counts_a_part_of_the_moments(small: None, tmp_path: Path) -> None:
    held = trainer_of(TWINS["AdamW"])
    run(held, 1)
    tensors = held._updates.state.tensors.values()
    moments = sum(t.nbytes for slots in tensors for t in slots.values())
    away = trainer_of(TWINS["AdamW"], tmp_path, memory_budget=held.plan.peak - moments // 2)
    # more is saved than recomputing could
    run(away, 1)
    assert away.plan.peak < held.plan.peak


def test_an_explanation_counts_a_part_and_names_the_rest(small: None, tmp_path: Path) -> None:
    held, away = trainer_of(TWINS["AdamW"]), trainer_of(TWINS["AdamW"], tmp_path)
    for trainer in (held, away):
        run(trainer, 1)
    [one, other] = [trainer.explain().memory for trainer in (held, away)]
    assert one is not None and other is not None
    moments = held.plan.sizes[MemoryRegion.PERSISTENT] - away.plan.sizes[MemoryRegion.PERSISTENT]
    assert one.kinds["optimizer"] == moments and other.kinds["optimizer"] == 2 * 4 * PART
    assert one.total - other.total == moments - 2 * 4 * PART
    said = [line for line in other.not_counted if "offload_optimizer" in line]
    assert len(said) == 1 and said[0].startswith(f"{moments / 2**20:.1f} MiB of")
    assert not any("offload_optimizer" in line for line in one.not_counted)
    assert away._optimizer.bytes_saved("8bit", away.model.parameters()) == 0
    assert held._optimizer.bytes_saved("8bit", held.model.parameters()) > 0


def test_a_part_of_a_rank_draws_the_numbers_of_its_elements(small: None, tmp_path: Path) -> None:
    """Moments in bf16 are rounded by the number of an element in the whole parameter."""
    trainer = trainer_of(TWINS["AdamW"], tmp_path, optimizer_state="bf16")
    run(trainer, 1)
    plan = trainer.plan
    [planned] = [x for x in plan.launches if len(offloaded.part_ranges(x)) == 4]
    firsts: list[int] = []

    def bind(arguments: KernelArguments) -> Callable[[], None]:
        firsts.append(arguments.attrs["first"])
        return lambda: None

    kernel = dataclasses.replace(planned.kernel, bind=bind)
    planned = dataclasses.replace(planned, kernel=kernel)
    tensor = trainer.snapshot().last_run.prepared.executable.tensor
    attrs = {**planned.attrs, "first": 7 * PART}  # of a rank that has these elements
    inputs = [None if x is None else tensor(x) for x in planned.inputs]
    arguments = KernelArguments(attrs, inputs, [tensor(y) for y in planned.outputs], [])
    bound_away(planned, arguments, plan.buffers, StateStore(torch.device("cpu"), tmp_path))
    assert firsts == [7 * PART, 8 * PART, 9 * PART, 10 * PART]
