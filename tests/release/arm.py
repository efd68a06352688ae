"""Runs the kernels as compiled for aarch64, under an emulator, beside this machine's own.

    make arm

Every call of a kernel in a training step of a tiny transformer, in fp32 and in bf16, is recorded
with the bytes that it reads. A program for aarch64 repeats the calls, and what they write has to be
what this machine's kernels wrote. Debian's packages g++-aarch64-linux-gnu and qemu-user-static have
the compiler and the emulator; nothing of Python runs under it. Calls of a BLAS library are left
out.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.kernels.native import library as native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian has those of aarch64
# The flags are those of setup.py.
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
ALIGN = 64
B, T, D, V = 3, 21, 32, 50  # batch, tokens, width, vocabulary


class Block(nn.Module):
    """A transformer of one block with dropout, i64[B,T] -> f32[B,T,V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(V, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down, self.head = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(ids), 0.1, self.training)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return self.head(self.last(x + self.down(F.gelu(self.up(x)))))


@dataclass
class Recorder:
    """Calls of kernels. memory: what they read, one behind the other. wanted: the place in it, the
    argument, its strides and its numbers, of each that a call has written. text: calls in C++."""

    memory: bytearray = field(default_factory=bytearray)
    wanted: list[tuple[int, str, tuple[int, ...], torch.Tensor]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def place(self, data: bytes) -> int:
        self.memory += bytes(-len(self.memory) % ALIGN)
        start = len(self.memory)
        self.memory += data
        return start

    def record(self, function: str, given: dict[str, Any], call: Callable[[], Any]) -> None:
        """Makes a call, and records it."""
        signature = native.declared()[function]
        if any(p.type == "Blas" for p in signature.parameters):
            call()
            return
        storages: dict[int, int] = {}
        words: list[str] = []
        written: list[tuple[int, str, torch.Tensor]] = []
        for p, c in zip(signature.parameters, signature.converted(given), strict=True):
            argument = given.get(p.name)
            if not p.pointer:
                number = c.value
                words.append(f"{number}LL" if isinstance(number, int) else f"{number!r}f")
            elif argument is None:
                words.append("nullptr")
            elif isinstance(argument, torch.Tensor):
                storage = argument.untyped_storage()
                base = storage.data_ptr()
                if base not in storages:
                    storages[base] = self.place(ctypes.string_at(base, storage.nbytes()))
                at = storages[base] + argument.data_ptr() - base
                words.append(f"memory + {at}")
                if not p.const and p.name != "scratch":
                    written.append((at, f"{function}: {p.name}", argument))
            else:
                words.append(f"memory + {self.place(bytes(c))}")
        call()
        self.wanted += [(at, name, x.stride(), x.detach().clone()) for at, name, x in written]
        kinds = [
            "void*" if p.pointer else {"int64_t": "long long"}.get(p.type, p.type)
            for p in signature.parameters
        ]
        if not self.counts[function]:
            self.text.insert(0, f'extern "C" void {function}({", ".join(kinds)});')
        self.counts[function] += 1
        self.text.append(
            f"static void call{len(self.text)}() {{ {function}({', '.join(words)}); }}"
        )

    def program(self) -> str:
        calls = [line.split("()")[0].split()[-1] for line in self.text if line.startswith("static")]
        head = ["#include <cstdio>", f"alignas({ALIGN}) static char memory[{len(self.memory)}];"]
        body = [
            "int main() {",
            "  if (std::fread(memory, 1, sizeof memory, stdin) != sizeof memory) return 1;",
            *(f"  {call}();" for call in calls),
            "  return std::fwrite(memory, 1, sizeof memory, stdout) != sizeof memory;",
            "}",
        ]
        return "\n".join([*head, *self.text, *body, ""])


def recorded() -> Recorder:
    """Trains two steps in each precision, and records the calls of the second."""
    recorder, launch = Recorder(), native.Library.launch
    is_on = False

    def watched(self: native.Library, function: str, /, **given: Any) -> Callable[[], Any]:
        call = launch(self, function, **given)

        def run() -> None:
            if is_on:
                recorder.record(function, given, call)
            else:
                call()

        return run

    native.Library.launch = watched  # type: ignore[method-assign]
    torch.set_num_threads(1)
    for precision in ("no", "bf16"):
        torch.manual_seed(0)
        model = Block()
        options = onward.TrainerOptions(mixed_precision=precision, max_grad_norm=0.5, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = onward.Trainer(
            model, optimizer, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            options=options,
        )  # fmt: skip
        for step in range(2):
            is_on = step == 1
            ids = torch.randint(0, V, (B, T))
            trainer.train_step(ids, ids.roll(-1, 1))
        is_on = False
    return recorder


def compiled(recorder: Recorder, folder: Path) -> Path:
    """The program for aarch64, with all kernels in it."""
    (folder / "calls.cpp").write_text(recorder.program())
    sources = sorted((native.FOLDER / "src").glob("*.cpp"))
    for path in (*sources, folder / "calls.cpp"):
        command = [COMPILER, *FLAGS, '-DONWARD_SOURCES="aarch64"', "-c", str(path)]
        subprocess.run([*command, "-o", str(folder / f"{path.stem}.o")], check=True)
    objects = map(str, sorted(folder.glob("*.o")))
    made = folder / "calls"
    subprocess.run([COMPILER, "-fopenmp", *objects, "-o", str(made)], check=True)
    return made


def main() -> None:
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"arm: no {' and no '.join(missing)}; fix: apt-get install "
                         "g++-aarch64-linux-gnu qemu-user-static")  # fmt: skip
    os.environ["ONWARD_NATIVE"] = "plain"  # the build of as many lanes
    if native.library() is None:
        raise SystemExit(f"arm: no kernels to compare with: {native.about()}")
    recorder = recorded()
    with tempfile.TemporaryDirectory() as name:
        program = compiled(recorder, Path(name))
        done = subprocess.run(
            [EMULATOR, "-L", LIBRARIES, str(program)], input=bytes(recorder.memory),
            stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    found = bytearray(done.stdout)
    worst: dict[str, float] = {}
    for at, where, strides, wanted in recorder.wanted:
        reach = 1 + sum((n - 1) * stride for n, stride in zip(wanted.shape, strides, strict=True))
        flat = torch.frombuffer(found, dtype=wanted.dtype, offset=at, count=reach)
        ours = flat.as_strided(wanted.shape, strides)
        if not wanted.is_floating_point():
            torch.testing.assert_close(
                ours, wanted, rtol=0, atol=0, msg=lambda m, w=where: f"{w} {m}"
            )
            continue
        low = wanted.dtype != torch.float32
        torch.testing.assert_close(
            ours, wanted, rtol=2e-2 if low else 1e-4, atol=2e-3 if low else 1e-5,
            msg=lambda m, w=where: f"{w} {m}",
        )  # fmt: skip
        gap = (ours.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
        worst[where] = max(worst.get(where, 0.0), gap)
    for function, count in sorted(recorder.counts.items()):
        gap = max((x for name, x in worst.items() if name.startswith(f"{function}:")), default=0.0)
        print(f"{function:<32} {count:>3} calls, largest difference {gap:.1e}")
    total = sum(recorder.counts.values())
    print(f"arm: {total} calls of {len(recorder.counts)} kernels write the same on "
          f"{platform.machine()}, by {native.about()}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
