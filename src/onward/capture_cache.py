"""The capture cache: captures on disk, keyed by everything that may decide them.

A model's source alone does not determine what its code does. So a capture is stored only where
everything that the code may read can be described in a key (capture/archive/surroundings.py,
model_state/lasting.py), and it is loaded where both keys match:

    first key = SHA-256 of: Onward's sources; versions and installed packages; the process's
                environment variables, arguments and flags; the user's files; torch's flags; the
                contents of transformers' and torch's modules; the call's arguments, without the
                numbers in tensors
    its file  = the attributes of plain objects (a configuration, say) that captures have read
    key       = SHA-256 of: the first key; the names of those attributes; the model and its loss
                function as `Lasting` describes them, plain objects by those attributes alone
    its file  = the capture (capture/archive/captured.py), and what the forward has set on the model

Every other call is captured as if there were no cache. cache_files.py reads and writes the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from onward import cache_files, graph_cache
from onward.capture import CapturedModule, CaptureRequest, GraphModule
from onward.capture import capture as own_capture
from onward.capture.archive.captured import read, written
from onward.capture.archive.surroundings import NotKept, surroundings
from onward.capture.aten import TABLE
from onward.capture.trace.as_eager import is_of_inference_mode
from onward.capture.trace.export import ONE_AT_A_TIME
from onward.capture.trace.flat_call import FlatCall, model_path, named_tensors
from onward.environment import environment
from onward.errors import CaptureError
from onward.graph.archive import ArchiveError
from onward.graph.registry import place_of
from onward.journal import Journal
from onward.model_state import Reads
from onward.model_state.effects import Effects
from onward.model_state.facts import ATOMS
from onward.model_state.lasting import Lasting
from onward.model_state.refusals import refuse_model

log = logging.getLogger("onward")

READ = "capture, kept from an earlier run"  # the stage of that name in a journal
_CACHE = "capture cache"
_MOST = 8  # sets of attribute names in the file of one first key
_SET = (bool, int, str, type(None))  # types of the values that a forward may have set
# path of a plain object -> the attributes of it that a capture has read; None for all of them
Names = dict[str, list[str] | None]


def kept(
    journal: Journal,
    capture: Callable[[CaptureRequest], CapturedModule],
    request: CaptureRequest,
) -> CapturedModule:
    """Returns `capture(request)`, loaded from disk where an earlier run has stored it. Only what
    `onward.capture.capture` returns is stored: another function in its place may do anything."""
    whole = isinstance(request.model, GraphModule)
    if whole or not environment().graph_cache or journal.looks_at_passes:
        with journal.timed("capture"):
            return capture(request)
    with journal.timed(_CACHE), ONE_AT_A_TIME:  # another capture patches modules that the key reads
        call = _Call.of(request) if capture is own_capture else None
        found = None if call is None else call.read()
    if found is not None:
        journal.seconds[READ] = journal.seconds.pop(_CACHE)
        log.info("the capture is kept from an earlier run")
        return found
    with journal.timed("capture"):
        captured = capture(request)
    if call is not None:
        with journal.timed(_CACHE), ONE_AT_A_TIME:
            call.write(captured)
    return captured


class _Call:
    """A call to be captured, with its first key. Raises NotKept where it cannot be cached."""

    def __init__(self, request: CaptureRequest) -> None:
        self.request = replace(request, gradients=request.differentiated)  # the mode may change
        self.model, self.loss_fn = request.model, request.loss_fn
        self.tensors: list[torch.Tensor] = []
        told = [f.name for f in fields(CaptureRequest) if f.name not in _BY_THE_WALK]
        tree = [[n, _argument(getattr(self.request, n), self.tensors)] for n in told]
        said = [torch.is_grad_enabled(), is_of_inference_mode()]
        met = Lasting(self.model, self.loss_fn, lambda x, path: None)
        ours = [graph_cache.registered(), graph_cache.sources(), graph_cache.versions()]
        foreign = [n for n, made in TABLE.items() if not place_of(made).startswith("onward.")]
        if foreign:
            raise NotKept(f"another package has registered a translation of {foreign[0]}")
        world = [ours, surroundings(met.modules())]
        self.key = _digest([world, tree, said])
        self._states = _random_states()
        self._before = {id(x): (x, dict(held)) for x, held in met.attributes()}

    @classmethod
    def of(cls, request: CaptureRequest) -> _Call | None:
        """Returns the call of a request; None where its capture cannot be cached."""
        try:
            return cls(request)
        except Exception as error:  # raised by any object of the user's; none may end a step here
            log.debug("the capture is not kept: %s", error)
            return None

    # ---- reading

    def read(self) -> CapturedModule | None:
        """Returns the capture of this call that an earlier run has stored; None where none has."""
        try:
            return self._read()
        except Exception as error:  # as above
            log.debug("the capture is not read: %s", error)
            return None

    def _read(self) -> CapturedModule | None:
        for names in cache_files.read(self.key, self._names_read) or ():
            walk = self._walk(names)
            if walk.doubts:
                continue
            key = self._key(names, walk)
            found = cache_files.read(key, lambda _, body, w=walk: self._unpacked(body, w))
            if found is not None and self._fits(found[0]):
                for held, name, value in found[1]:
                    held[name] = value
                return found[0]
        return None

    def _fits(self, captured: CapturedModule) -> bool:
        try:
            refuse_model(self.model, self.loss_fn, self.request.trains, self.request.want_loss)
        except CaptureError:
            return False
        return captured.dims(self.tensors) is not None

    def _names_read(self, key: str, body: bytes) -> list[Names]:
        try:
            said = json.loads(body[8:])
            if said["key"] != key:
                raise ArchiveError("another key")
            return [
                {str(path): None if names is None else list(map(str, names)) for path, names in one}
                for one in said["names"]
            ]
        except Exception as error:  # any, since a value of any type may stand anywhere
            raise ArchiveError(str(error)) from error

    def _unpacked(
        self, body: bytes, walk: Lasting
    ) -> tuple[CapturedModule, list[tuple[dict[str, Any], str, Any]]]:
        """Returns the capture in a file, and the attributes to set on loading it: for each the
        `__dict__` of an object, a name and a value. Raises ArchiveError."""
        length = 8 + int.from_bytes(body[:8], "little")
        try:
            sets = [
                (vars(walk.plain[path][0]), str(name), value)
                for path, name, value in json.loads(body[8:length])["sets"]
            ]
        except Exception as error:  # any, since a value of any type may stand anywhere
            raise ArchiveError(str(error)) from error
        if not all(isinstance(value, _SET) for _, _, value in sets):
            raise ArchiveError("an attribute to set is no plain value")
        reads = Reads(x for x, names in walk.plain.values() if names is not None)
        for x, names in walk.plain.values():
            for name in names or ():
                reads.note(x, name)
        captured = read(body[length:], self._live(), reads)
        captured.effects = Effects()
        return captured, sets

    # ---- writing

    def write(self, captured: CapturedModule) -> None:
        """Stores a capture of this call, unless something that may decide it is in no key."""
        try:
            self._write(captured)
        except Exception as error:  # as above
            log.debug("the capture is not kept: %s", error)

    def _write(self, captured: CapturedModule) -> None:
        if _random_states() != self._states:
            raise NotKept("random numbers were drawn")
        body = written(captured, self._live())
        walk = Lasting(self.model, self.loss_fn, lambda x, path: captured.reads.names(x))
        names: Names = {
            path: None if names is None else sorted(names)
            for path, (_, names) in walk.plain.items()
        }
        sets = self._sets(captured, walk)
        walk.tell()
        if walk.doubts:
            raise NotKept("; ".join(walk.doubts[:3]))
        head = json.dumps({"sets": sets}).encode()
        packed = b"".join((len(head).to_bytes(8, "little"), head, body))
        known = cache_files.read(self.key, self._names_read) or []
        if names not in known:
            said = [list(one.items()) for one in [names, *known][:_MOST]]
            text = json.dumps({"key": self.key, "names": said}).encode()
            cache_files.write(self.key, lambda: len(text).to_bytes(8, "little") + text)
        cache_files.write(self._key(names, walk), lambda: packed)

    def _sets(self, captured: CapturedModule, walk: Lasting) -> list[tuple[str, str, Any]]:
        """Returns what the forward has set on plain objects, as (object's path, name, value), and
        puts the values from before it into the walk. Raises NotKept where it has set more."""
        assert captured.effects is not None, "as it is written"
        found: list[tuple[str, str, Any]] = []
        for path, (x, _) in walk.plain.items():
            before, now = self._before.get(id(x), (x, None))[1], _attributes(x)
            if before is None or now is None:
                if before is not now:
                    raise NotKept(f"{path} was made by the forward")
                continue
            for name in dict.fromkeys([*before, *now]):
                old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
                if old is new:
                    continue
                if type(new) not in _SET or not (old is _ABSENT or type(old) in ATOMS):
                    raise NotKept(f"the forward sets {path}.{name}")
                found.append((path, name, new))
                walk.stood(f"{path}.{name}", old, old is _ABSENT)
        ends = sorted(path.rpartition(".")[2] for path in captured.effects.written)
        if ends != sorted(name for _, name, _ in found):
            raise NotKept(f"the forward sets {', '.join(captured.effects.written[:3])}")
        return found

    # ---- both

    def _walk(self, names: Names) -> Lasting:
        def read_at(x: Any, path: str) -> frozenset[str] | None:
            found = names.get(path)
            return None if found is None else frozenset(found)

        walk = Lasting(self.model, self.loss_fn, read_at)
        walk.tell()
        return walk

    def _key(self, names: Names, walk: Lasting) -> str:
        return _digest([self.key, sorted(names.items()), walk.told])

    def _live(self) -> dict[str, torch.Tensor]:
        """Returns parameters and buffers by their paths; a tied one by its first path."""
        spec: Any = None
        flat = FlatCall(self.request, spec, [])
        return {model_path(name): t for name, t in named_tensors(flat)}


_BY_THE_WALK = ("model", "loss_fn")  # fields that `Lasting` describes; the first key has the others
_ABSENT = object()


def _argument(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns an argument as JSON, tensors by dtype, device and form; appends them to `tensors`.
    Raises NotKept for other values."""
    if isinstance(x, torch.Tensor):
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or vars(x):
            raise NotKept(f"an argument is a {type(x).__qualname__}")
        if x.layout is not torch.strided or x.is_complex():
            raise NotKept("an argument is a complex tensor, or one that is not strided")
        tensors.append(x)
        sizes = [n if n < 2 else "n" for n in x.shape]
        form = [x.requires_grad, x.is_inference(), x.is_contiguous(), x.is_leaf]
        return ["tensor", str(x.dtype), str(x.device), sizes, form]
    if type(x) in (list, tuple):
        return [type(x).__name__, *(_argument(y, tensors) for y in x)]
    if type(x) is dict and all(type(k) is str for k in x):
        return ["dict", *([k, _argument(y, tensors)] for k, y in x.items())]
    if type(x) in ATOMS:
        return [type(x).__name__, x.hex() if isinstance(x, float) else repr(x)]
    raise NotKept(f"an argument is a {type(x).__qualname__}")


def _attributes(x: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None


def _random_states() -> list[Any]:
    numbers = repr(np.random.get_state(legacy=False))
    return [random.getstate(), numbers, torch.get_rng_state().tolist()]


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


__all__ = ["READ", "kept"]
