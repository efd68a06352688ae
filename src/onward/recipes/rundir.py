"""The output folder: written beside its final place, and renamed when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON (a NaN raises), indented, ending in a line feed."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


class RunDirectory:
    """A folder that appears at `final` whole, or not at all.

    `with RunDirectory(final) as partial:` gives a sibling of `final` to write into; leaving the
    block without an error renames it. After an error it is removed, with any parents made for it,
    unless it has a trained model already: then it stays, and `kept` is its path.
    """

    def __init__(self, final: Path) -> None:
        self.final = final.absolute()
        self.partial = self.final.with_name(f".{self.final.name}.partial-{os.getpid()}")
        self.kept: Path | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Path:
        parent = self.final.parent
        self._made = [path for path in (parent, *parent.parents) if not path.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir()
        return self.partial

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.kept = self.partial
            if self.final.is_dir():
                self.final.rmdir()  # raises if it was filled meanwhile, so that nothing is lost
            self.partial.rename(self.final)
            self.kept = None
        elif any(self.partial.glob("*.safetensors")):
            self.kept = self.partial
        else:
            shutil.rmtree(self.partial, ignore_errors=True)
            for path in self._made:
                try:
                    path.rmdir()
                except OSError:
                    break
