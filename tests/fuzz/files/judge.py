"""The judge: a case of a format is made from its seed, loaded in the sandbox, and given a verdict.

A load must refuse the files in one line that names a file, or load what an independent reader finds
in them; within 2 s of processor time and 512 MiB, and without opening or running anything else.
"""

from __future__ import annotations

import os
import random
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.files.sandbox import Cost, Sandbox

SECONDS = 2.0  # of processor time
BYTES = 512 << 20
LINE = 500  # characters of a refusal


class Format(NamedTuple):
    """How files of one format are made, changed, loaded and compared.

    make: writes a valid folder. change: changes it as the generator draws, and says how; the second
    path is the folder that nothing may open. load: what the product makes of it; `Refused` aside,
    any exception is a finding. check: what of a loaded thing is not as an independent reader finds
    it in the files; None where it is right. refusals: the exceptions by which the product may
    refuse. names: whether a refusal has to name a file; readers of bytes know none.
    """

    make: Callable[[Path], None]
    change: Callable[[Path, random.Random, Path], str]
    load: Callable[[Path], Any]
    check: Callable[[Path, Any], str | None]
    refusals: tuple[type[Exception], ...]
    names: bool = True


class Verdict(NamedTuple):
    """What became of a case. kind: loaded, refused, or one of the findings. detail: the change, and
    the refusal or the finding in full. signature: findings of one cause have one."""

    format: str
    seed: int
    kind: str
    signature: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def finding(self) -> bool:
        return self.kind not in ("loaded", "refused")


class Judge:
    """Judges cases in this process, in a folder of its own."""

    def __init__(self, root: Path, formats: Mapping[str, Format]) -> None:
        self.root, self.formats = Path(os.path.realpath(root)), formats
        self.sandbox = Sandbox(self.root)
        self._ready: set[str] = set()

    def prepare(self, name: str) -> None:
        """Makes the valid folder of a format and loads it, which imports what that needs. Raises
        AssertionError where it is refused or not right."""
        if name in self._ready:
            return
        form = self.formats[name]
        template = self.root / name
        shutil.rmtree(template, ignore_errors=True)
        template.mkdir(parents=True)
        form.make(template)
        self._plant(template)
        for _ in range(2):
            self._copy(name)
            wrong = form.check(self.sandbox.case, form.load(self.sandbox.case))
            assert wrong is None, f"{name}: the valid files: {wrong}"
        self._ready.add(name)

    def judge(self, name: str, seed: int) -> Verdict:
        """Makes and judges one case."""
        self.prepare(name)
        form, case = self.formats[name], self.sandbox.case
        self._copy(name)
        change = form.change(case, random.Random(f"{name} {seed}"), self.sandbox.outside)
        loaded: Any = None
        error: BaseException | None = None
        with self.sandbox.watched() as cost:
            try:
                loaded = form.load(case)
            except BaseException as raised:
                error = raised
        verdict = self._verdict(form, loaded, error, cost)
        kind, signature, said = verdict
        if kind == "loaded":
            try:
                wrong = form.check(case, loaded)
            except Exception as failed:
                wrong = f"cannot be compared: {failed!r}"
            if wrong is not None:
                kind, signature, said = "wrong", f"wrong: {wrong}"[:160], wrong
        detail = f"{change}: {said}"[:3000]
        return Verdict(name, seed, kind, signature[:200], detail, cost.seconds)

    def _verdict(
        self, form: Format, loaded: Any, error: BaseException | None, cost: Cost
    ) -> tuple[str, str, str]:
        """Kind, signature and words of a load, before what it gave is compared."""
        strange = self.sandbox.strange(cost)
        if strange is not None:
            return "strange", f"strange: {strange}".replace(str(self.root), ""), strange
        if error is not None and not isinstance(error, form.refusals):
            lines = traceback.format_exception(error)
            where = _place(error)
            return "escaped", f"escaped: {type(error).__name__} at {where}", "".join(lines)[-2500:]
        if cost.bytes > BYTES:
            return "memory", f"memory at {_place(error)}", f"{cost.bytes >> 20} MiB; {error!r:.500}"
        if cost.seconds > SECONDS:
            return "slow", f"slow at {_place(error)}", f"{cost.seconds:.1f} s; {error!r:.500}"
        if error is None:
            return "loaded", "", "loaded"
        text = str(error)
        if len(text.splitlines()) != 1 or not text.isprintable():
            return "unreadable", f"not one printable line, at {_place(error)}", repr(text)[:1500]
        if len(text) > LINE:
            return "unreadable", f"over {LINE} characters, at {_place(error)}", text[:1500]
        if form.names and str(self.sandbox.case) not in text:
            return "unreadable", f"names no file, at {_place(error)}", text
        return "refused", "", text

    def _copy(self, name: str) -> None:
        case = self.sandbox.case
        if case.is_symlink() or not case.is_dir():
            case.unlink(missing_ok=True)
        else:
            shutil.rmtree(case)
        shutil.copytree(self.root / name, case)

    def _plant(self, template: Path) -> None:
        """Copies of the valid files where nothing may read, and code where nothing may run."""
        for path in template.iterdir():
            if path.is_file():
                shutil.copy(path, self.sandbox.outside / path.name)
        outside = self.sandbox.outside
        for name in ("x.safetensors", "planted.py", "x.data", "x.json", "planted.txt"):
            (outside / name).write_bytes(b"planted = 1\n")


def _place(error: BaseException | None) -> str:
    """The innermost place in Onward's sources that an error comes from, and its innermost place."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [f for f in frames if "/src/onward/" in f.filename]
    shown = [f"{Path(f.filename).name}:{f.name}" for f in (*own[-1:], *frames[-1:])]
    return " < ".join(dict.fromkeys(reversed(shown))) or "nowhere"
