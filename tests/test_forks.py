"""Processes that `os.fork` has made of one that trains, with threads of OpenMP's: what they compute
is right, to the bit, or one line refuses it; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = '''
import json, multiprocessing, os, signal, sys, tempfile, threading, warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import onward
from onward.execute.binder import Binder

warnings.simplefilter("ignore")
torch.set_num_threads(2)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 3000)
        )

    def forward(self, x, labels):
        return F.cross_entropy(self.layers(x), labels)


X, Y = torch.randn(256, 64), torch.randint(0, 3000, (256,))


def trainer_of(model):
    return onward.Trainer(model, torch.optim.AdamW(model.parameters()))


def in_child(act, seconds=60):
    """What the act returns in a forked process; "hangs" where it does not end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as end:
        said = end.read()
    _, status = os.waitpid(child, 0)
    return json.loads(said) if said else f"hangs: signal {status & 127}"


def weights(model):
    return [p.detach().double().sum().item() for p in model.parameters()]


found = {}
model = Net(0)
trainer = trainer_of(model)
for _ in range(2):
    trainer.train_step(X, Y)
trainer.eval_step(X, Y)


def steps():
    return [*(trainer.train_step(X, Y).loss.item() for _ in range(3)), *weights(model)]


def evaluation(_=None):
    return trainer.eval_step(X, Y).loss.item()


accelerated = onward.accelerate(Net(1))


def call():
    accelerated.zero_grad()
    loss = accelerated(X, Y)
    loss.backward()
    return [loss.item(), *(p.grad.double().sum().item() for p in accelerated.parameters())]


call()
product = lambda: torch.mm(X, X.T).relu().sum().item()
found["eager"] = [in_child(product), product()]
found["eval_step"] = [in_child(evaluation), evaluation()]
found["accelerated"] = [in_child(call), call()]
found["of the child"] = [in_child(lambda: in_child(evaluation)), evaluation()]
with multiprocessing.get_context("fork").Pool(2) as pool:
    found["pool"] = [pool.map_async(evaluation, range(4)).get(120), [evaluation()] * 4]


class Losses(Dataset):
    """Each sample is what an evaluation in its loader's process gives."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return evaluation()


loader = DataLoader(Losses(), batch_size=2, num_workers=2, multiprocessing_context="fork")
loader.timeout = 120
found["loader"] = [[x for b in loader for x in b.tolist()], [evaluation()] * 4]


def fresh():
    other = trainer_of(Net(2))
    return [other.train_step(X, Y).loss.item() for _ in range(2)]


found["a new Trainer"] = [in_child(fresh), fresh()]
with tempfile.TemporaryDirectory() as folder:
    begun, go = threading.Event(), threading.Event()
    writer = trainer._writer

    def write():
        begun.set()
        go.wait(60)

    writer.add(folder, write)
    begun.wait(60)

    def saved():
        trainer.finish_saves()
        trainer.save(f"{folder}/child", background=True)
        trainer.finish_saves()
        return sorted(os.listdir(f"{folder}/child"))

    found["saves"] = [in_child(saved), ["checkpoint-2"]]
    go.set()
    trainer.finish_saves()
child = in_child(steps)
found["train_step"] = [child, steps()]

# ---- a fork while another thread is in the middle of something

held, go = threading.Event(), threading.Event()
plain = Binder.run


def waiting(self, numbers):
    if threading.current_thread() is not threading.main_thread():
        held.set()
        go.wait(60)
    return plain(self, numbers)


def beside(act, *tries):
    """What children do that are forked while another thread is in the middle of `act`."""
    held.clear(), go.clear()
    thread = threading.Thread(target=act)
    thread.start()
    assert held.wait(60)
    said = [in_child(one) for one in tries]
    go.set()
    thread.join(60)
    return said


Binder.run = waiting
other = trainer_of(Net(3))
other.train_step(X, Y)
found["within a step"] = beside(
    lambda: other.train_step(X, Y), lambda: other.train_step(X, Y).loss.item(), evaluation, product
)
found["within a step, right"] = evaluation(), product()
found["within a call"] = beside(call, call, evaluation)
Binder.run = plain


class Waits(Net):
    def forward(self, x, labels):
        waiting_here()
        return super().forward(x, labels)


def waiting_here():
    if threading.current_thread() is not threading.main_thread():
        held.set()
        go.wait(60)


captured = trainer_of(Waits(4))
found["within a capture"] = beside(lambda: captured.train_step(X, Y), fresh, evaluation)
found["afterwards"] = [fresh(), found["a new Trainer"][1]]
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OMP_NUM_THREADS": "2", "ONWARD_GRAPH_CACHE": "0"},
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


RIGHT = (
    "eager", "eval_step", "accelerated", "of the child", "pool", "a new Trainer", "saves",
    "train_step", "afterwards",
)  # fmt: skip
REFUSED = "OnwardError: this process was forked while another thread was "


@pytest.mark.parametrize("what", RIGHT)
def test_a_child_computes_what_its_parent_does(what: str, found: dict[str, Any]) -> None:
    got, want = found[what]
    assert got == want


def test_workers_of_a_loader_compute_on_one_thread(found: dict[str, Any]) -> None:
    """PyTorch gives them one, so that sums differ from the parent's in their last bits."""
    got, want = found["loader"]
    assert got == pytest.approx(want, rel=1e-6)
    assert len(set(got)) == 1


def test_what_another_thread_was_doing_is_refused(found: dict[str, Any]) -> None:
    step, evaluation, product = found["within a step"]
    assert step.startswith(REFUSED + "using a Trainer"), step
    assert [evaluation, product] == list(found["within a step, right"])
    call, evaluation = found["within a call"]
    assert call.startswith(REFUSED + "running an accelerated model"), call
    assert evaluation == found["within a step, right"][0]


def test_a_capture_beside_a_lost_one_is_refused(found: dict[str, Any]) -> None:
    fresh, evaluation = found["within a capture"]
    refused = fresh.replace("CaptureError", "OnwardError")
    assert refused.startswith(REFUSED + "capturing a model"), fresh
    assert evaluation == found["within a step, right"][0]


BUILT = """
import multiprocessing, sys
import torch

import onward


def losses(_=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), torch.nn.functional.mse_loss)
    return [trainer.train_step(torch.ones(4, 6), torch.ones(4, 3)).loss.item() for _ in range(2)]


if __name__ == "__main__":
    here = losses()
    made = {}
    pools = [multiprocessing.get_context(m).Pool(1) for m in ("spawn", "forkserver")]
    runs = [pool.map_async(losses, [0]) for pool in pools]
    print(all(run.get(120) == [here] for run in runs))
"""


def test_processes_that_begin_anew_train_as_this_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BUILT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr[-2000:]
