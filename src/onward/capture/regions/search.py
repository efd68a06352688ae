"""RegionSearch: finds, by trial, the submodules that have to be regions of a capture.

A submodule can be a region if its arguments are tensors and plain values, its results are tensors
with shapes that follow from its arguments', it writes into none of its arguments, and it reads no
parameters but its own. If it cannot, the module around it is tried.
"""

from __future__ import annotations

import contextlib
import dis
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from onward.capture.held_sizes import Held
from onward.capture.regions import op
from onward.capture.regions.blame import blamed, named_places
from onward.capture.regions.region import TENSOR, CapturedRegion, Form, module_region
from onward.capture.regions.shapes import Results, read, resized
from onward.errors import CaptureError
from onward.graph.graph import Graph, attributes, needed
from onward.model_state import Snapshot
from onward.model_state.code import attribute_names, underlying
from onward.model_state.device import keeping_generators
from onward.model_state.effects import (
    Effects,
    changes,
    keeping_buffers,
    keeping_parameters,
    undoing,
)
from onward.model_state.refusals import BACKWARD_HOOKS, FORWARD_HOOKS, without_hooks

log = logging.getLogger("onward")

_SLOT = "_compiled_call_impl"
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
Made = TypeVar("Made")
_TRIES = 12  # failed captures after which the search gives up


class Unfit(Exception):
    """Raised with the reason why a module cannot be a region."""


@dataclass
class ObservedCall:
    """A call of a candidate in an eager run of the whole model.

    form, returned: the structures of arguments and results. inputs, outputs: shapes of the tensors
    in them. dtypes: dtypes of the results. draws: whether it drew torch's random numbers."""

    form: Form
    returned: Form
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    draws: bool


@dataclass
class RegionCandidate:
    """A submodule that is to be a region.

    seen: its calls in an eager run with the batch. others: those in a run with other sizes; None
    where no size may vary. written: paths of all that its calls set, filled in where needed. sets:
    paths of the values set in its own modules."""

    module: torch.nn.Module
    path: str
    reason: str
    seen: list[ObservedCall] = field(default_factory=list)
    others: list[ObservedCall] | None = None
    written: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    called: int = 0  # how often in the present trace


class RegionSearch:
    """The search for regions in one capture of `model`, and their record during a trace.

    gradients: whether gradients are asked for. made: the regions of the last trace, by site."""

    def __init__(self, model: torch.nn.Module, gradients: bool) -> None:
        self.model, self.gradients = model, gradients
        self.made: list[CapturedRegion] = []
        self._chosen: list[RegionCandidate] = []
        self._unfit: set[int] = set()  # ids of modules that cannot be regions
        self._tracing = False
        self._tries = 0
        self._held: Held = {}
        self._reason = ""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The submodules chosen to be regions so far."""
        return [c.module for c in self._chosen]

    @property
    def held(self) -> Held:
        """The sizes of the batch that have to be numbers."""
        return self._held

    def captured(
        self,
        error: CaptureError,
        call: Callable[[], tuple[Any, list[torch.Tensor]]],
        capture: Callable[[RegionSearch], Made],
    ) -> Made | None:
        """Returns a capture with regions in place of what `error` refuses; None where the search
        fails. call: returns the whole call, to run in eager mode, and the batch's tensors. capture:
        tries to capture with the present regions."""
        flat, tensors = call()
        again: CaptureError | None = error
        if error.places:  # perhaps the places of operators, which may be regions by themselves
            again, made = self._try(capture)
            if made is not None:
                return made
        while again is not None and self.widen(again, tensors, lambda batch: flat.run(*batch)):
            again, made = self._try(capture)
            if made is not None:
                return made
        return None

    def _try(
        self, capture: Callable[[RegionSearch], Made]
    ) -> tuple[CaptureError | None, Made | None]:
        try:
            return None, capture(self)
        except CaptureError as error:
            log.debug(
                "capturing with %s in eager PyTorch failed: %s",
                [c.path for c in self._chosen],
                error,
            )
            return error, None

    def in_graph(self, graph: Graph) -> list[CapturedRegion]:
        """Returns the regions in the order of their sites. Adds an output for each that the loss
        does not read, so that it runs in each step for its side effects. Raises CaptureError where
        the export has dropped one."""
        nodes = {int(attributes(n)["site"]): n for n in graph if n.op_type == "Region"}
        loss = graph.signature.loss or graph.signature.results.get("loss")
        read = set[Any]() if loss is None else needed(graph, [loss])
        for site, part in enumerate(self.made):
            if part.module is None:
                continue
            if site not in nodes:
                raise CaptureError(f"nothing reads what {part.path} returns")
            if loss is not None and nodes[site] not in read:
                name = f"region.{site}"
                graph.outputs[name] = nodes[site].outputs[0]
                graph.signature = graph.signature.but(parts={f"{part.path} {site}": name})
        return list(self.made)

    # ---- choosing

    def widen(
        self,
        error: CaptureError,
        tensors: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor]], Any],
    ) -> bool:
        """Makes candidates of the modules that an error is about, and perhaps of others of their
        classes. Returns whether it found one for each. run: runs the whole model in eager mode on a
        batch's tensors."""
        self._tries += 1
        if self._tries > _TRIES:
            return False
        self._reason = first_line(error)
        if error.places:
            chains = named_places(error, self.model)
            found = [self._widened(chain, False, tensors, run) for chain in chains]
            return all(found)
        return self._widened(blamed(error, self.model), True, tensors, run)

    def _widened(
        self,
        chain: Sequence[torch.nn.Module],
        alike: bool,
        tensors: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor]], Any],
    ) -> bool:
        """Makes a candidate of the first module of the chain that can be a region. Returns whether
        there is one. alike: whether to take other modules of its class too."""
        inner = {id(m) for c in self._chosen for m in c.module.modules()}
        for module in chain:
            if id(module) in {id(c.module) for c in self._chosen}:  # failed again as a region
                self._unfit.add(id(module))
                self._chosen = [c for c in self._chosen if c.module is not module]
                continue
            new = id(module) not in self._unfit and id(module) not in inner
            if new and self._taken(module, alike, tensors, run):
                return True
        return False

    def _taken(
        self,
        module: torch.nn.Module,
        alike: bool,
        tensors: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor]], Any],
    ) -> bool:
        """Returns whether a module can be a region; if so, makes a candidate of it, and if `alike`
        of the other modules of its class."""
        paths = {id(m): n for n, m in self.model.named_modules()}
        taken = [module]
        if alike:
            same = [m for m in self.model.modules() if type(m) is type(module)]
            same = [m for m in same if m is not self.model and id(m) not in self._unfit]
            same = [m for m in same if not any(m is not n and m in [*n.modules()] for n in same)]
            taken = same if any(m is module for m in same) else taken
        within = {id(x) for m in taken for x in m.modules()}
        before = self._chosen
        kept = [c for c in before if id(c.module) not in within]
        self._chosen = [*kept, *(RegionCandidate(m, paths[id(m)], self._reason) for m in taken)]
        try:
            self._probe(tensors, run)
        except Exception as error:  # Unfit, or any error of the model on a batch of other sizes
            log.debug(
                "%s cannot run in eager PyTorch within the graph: %s", paths[id(module)], error
            )
            self._unfit.add(id(module))
            self._chosen = before
            return False
        return True

    def _probe(
        self, tensors: Sequence[torch.Tensor], run: Callable[[Sequence[torch.Tensor]], Any]
    ) -> None:
        """Runs the model in eager mode with the batch and with other sizes, records the candidates'
        calls, and sets `held`. Raises Unfit where one cannot be a region."""
        for chosen in self._chosen:
            chosen.seen, chosen.others, chosen.written = [], None, []
        with self._recorded(lambda c: c.seen):
            written = self._eager(tensors, run)
        if any(not c.seen for c in self._chosen):
            self._chosen = [c for c in self._chosen if c.seen]
            if not self._chosen:
                raise Unfit("it is not called")
        self._held = {}
        for way in range(3):
            other = resized(tensors, way)
            if other is None:
                continue
            for chosen in self._chosen:
                chosen.others = []
            with contextlib.suppress(Exception), self._recorded(lambda c: c.others):
                self._eager(other, run)
                if any(len(c.others or ()) != len(c.seen) for c in self._chosen):
                    raise Unfit("how often it is called depends on the batch")
                if way == 2:
                    self._hold(tensors, range(1, 99))
                break
        else:
            self._hold(tensors, range(99))
            for chosen in self._chosen:
                chosen.others = None
        for chosen in self._chosen:
            for i, seen in enumerate(chosen.seen):
                self._results(chosen, i, seen)
        for chosen in self._chosen:
            chosen.sets = [p for p in written if p.startswith(f"model.{chosen.path}.")]
            chosen.sets += set_by_hooks(chosen.module, f"model.{chosen.path}")
        if any(path not in chosen.sets for chosen in self._chosen for path in written):
            self._require_within(tensors, run)
        self._require_unread()

    def _require_unread(self) -> None:
        """Raises Unfit where code outside of the regions may read an attribute that one sets, of
        which a graph would hold an old value."""
        inside = {id(m) for c in self._chosen for m in c.module.modules()}
        parts = {type(m) for c in self._chosen for m in c.module.modules()}  # read only their own
        kinds = {type(m) for m in self.model.modules() if id(m) not in inside} - parts
        classes = {c for kind in kinds for c in kind.__mro__} - {*torch.nn.Module.__mro__}
        code = [getattr(underlying(x), "__code__", None) for c in classes for x in vars(c).values()]
        read = {name for c in code if c is not None for name in attribute_names(c)}
        for chosen in self._chosen:
            for path in chosen.sets:
                for name in read.intersection(re.split(r"[.\[]", path)[1:]):
                    if path.endswith(f".{name}") or f".{name}[" in path:
                        raise Unfit(
                            f"it sets the attribute {path}, which code outside of it may read"
                        )

    def _require_within(
        self, tensors: Sequence[torch.Tensor], run: Callable[[Sequence[torch.Tensor]], Any]
    ) -> None:
        """Raises Unfit where a candidate sets an attribute of another module, which the graph may
        depend on."""

        def watched(chosen: RegionCandidate) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                before = Snapshot(self.model, None)
                made = chosen.module._call_impl(*args, **kwargs)
                chosen.written += changes(before, Snapshot(self.model, None))
                return made

            return call

        with self._slots(watched):
            self._eager(tensors, run)
        for chosen in self._chosen:
            for path in chosen.written:
                if not path.startswith(f"model.{chosen.path}."):
                    raise Unfit(f"it sets {path}, an attribute of another module")

    def _hold(self, tensors: Sequence[torch.Tensor], dims: range) -> None:
        self._held = {
            (leaf, d): (0, 0) for leaf, t in enumerate(tensors) for d in range(t.dim()) if d in dims
        }

    def _results(self, chosen: RegionCandidate, i: int, seen: ObservedCall) -> Results:
        other = None if chosen.others is None else chosen.others[i]
        if other is not None and (
            other.form != seen.form
            or other.returned != seen.returned
            or other.dtypes != seen.dtypes
            or len(other.inputs) != len(seen.inputs)
        ):
            raise Unfit("the structure of its arguments or outputs depends on the batch")
        shapes = read(
            seen.inputs,
            seen.outputs,
            None if other is None else other.inputs,
            None if other is None else other.outputs,
        )
        if shapes is None:
            raise Unfit("the shape of its output depends on the data")
        return Results(shapes, tuple(seen.dtypes))

    def _eager(
        self, tensors: Sequence[torch.Tensor], run: Callable[[Sequence[torch.Tensor]], Any]
    ) -> list[str]:
        """Runs the model once without lasting side effects, and without hooks, which may do
        anything. Returns the paths of what it has set."""
        effects = Effects()
        with (
            keeping_buffers(self.model, None),
            keeping_parameters(self.model, None, numbers=False),
            keeping_generators(tensors, self.model.parameters(), self.model.buffers()),
            torch.set_grad_enabled(self.gradients),
            undoing(effects, self.model, None),
            without_hooks(self.model),
        ):
            run(tensors)
        return effects.written

    @contextlib.contextmanager
    def _recorded(
        self, into: Callable[[RegionCandidate], list[ObservedCall] | None]
    ) -> Iterator[None]:
        """A context in which the candidates' calls are appended to the lists that `into` gives."""

        def noting(chosen: RegionCandidate) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                made, seen = self._noted(chosen.module, args, kwargs)
                found = into(chosen)
                if found is not None:
                    found.append(seen)
                return made

            return call

        with self._slots(noting):
            yield

    def _noted(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ObservedCall]:
        form, xs = Form.of((args, kwargs))
        if not all(isinstance(x, _PLAIN) for x in form.fixed if x is not TENSOR):
            raise Unfit("one of its arguments is neither a tensor, a number nor a string")
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in xs):
            raise Unfit("one of its arguments is of a subclass of torch.Tensor")
        before, state = [x._version for x in xs], torch.random.get_rng_state()
        hooks = [len(x._backward_hooks or ()) for x in xs]
        made = module._call_impl(*args, **kwargs)
        draws = not torch.equal(state, torch.random.get_rng_state())
        if [x._version for x in xs] != before:
            raise Unfit("it writes in place into an argument")
        # a hook would also see gradients from readers of the argument outside of the module
        if [len(x._backward_hooks or ()) for x in xs] != hooks:
            raise Unfit("it registers a hook on an argument")
        returned, ys = Form.of(made)
        if not ys or not all(isinstance(y, _PLAIN) for y in returned.fixed if y is not TENSOR):
            raise Unfit("it returns something other than tensors")
        if not xs and not list(module.parameters()):
            raise Unfit("none of its arguments is a tensor")
        storages = {x.untyped_storage().data_ptr() for x in xs}
        storages |= {p.untyped_storage().data_ptr() for p in module.parameters()}
        own = [y.untyped_storage().data_ptr() for y in ys if y.numel()]
        if storages & set(own) or len(set(own)) < len(own):
            raise Unfit("one of its outputs shares memory with another tensor")
        if self.gradients:
            self._require_own(module, xs, ys)
        sizes = [tuple(x.shape) for x in xs], [tuple(y.shape) for y in ys]
        return made, ObservedCall(form, returned, *sizes, [y.dtype for y in ys], draws)

    def _require_own(
        self, module: torch.nn.Module, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]
    ) -> None:
        """Raises Unfit where autograd reaches, from the results and not through an argument, a
        parameter that is not the module's own, or a lookup whose gradient is sparse."""
        own = {id(p) for p in module.parameters()}
        stop = {x.grad_fn for x in xs if x.grad_fn is not None}
        given = {id(x) for x in xs}
        stack: list[Any] = [y.grad_fn for y in ys if y.grad_fn is not None]
        seen: set[Any] = set()
        while stack:
            node = stack.pop()
            if node in seen or node in stop:
                continue
            seen.add(node)
            if getattr(node, "_saved_sparse", False):
                raise Unfit("gradients within it are sparse tensors")
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in own and id(leaf) not in given:
                raise Unfit("it reads a parameter of another module")
            stack += [after for after, _ in node.next_functions if after is not None]

    # ---- a trace

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which a candidate's call is one op in a trace, and runs as usual outside of
        one."""
        with self._slots(self._recording):
            yield

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context around a trace, in which `recorded` records ops."""
        self._tracing = True
        try:
            yield
        finally:
            self._tracing = False

    def begin(self) -> None:
        """Forgets the ops of the last trace; called before each run of the forward in a trace."""
        self.made.clear()
        op.RESULTS.clear()
        for chosen in self._chosen:
            chosen.called = 0

    def _recording(self, chosen: RegionCandidate) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._tracing:
                with torch._C.DisableTorchFunction():  # its data branches are not the graph's
                    return chosen.module._call_impl(*args, **kwargs)
            return self._op(chosen, args, kwargs)

        return call

    def _op(self, chosen: RegionCandidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, site = chosen.called, len(self.made)
        chosen.called += 1
        form, xs = Form.of((args, kwargs))
        if number >= len(chosen.seen):
            raise CaptureError(f"{chosen.path} is called more often in a trace than in eager mode")
        seen = chosen.seen[number]
        sizes = [tuple(n if isinstance(n, int) else n.node.hint for n in x.shape) for x in xs]
        if form != seen.form or sizes != seen.inputs:
            raise CaptureError(
                f"{chosen.path} is called with other arguments in a trace than in eager mode"
            )
        op.RESULTS.append(self._results(chosen, number, seen))
        part = module_region(chosen.module, chosen.path, chosen.reason, form, seen.draws)
        part.sets = tuple(chosen.sets)
        self.made.append(part)
        parameters = list(chosen.module.parameters())
        ys = torch.ops.onward.region(list(xs), parameters, site)
        return seen.returned.built(ys)

    @contextlib.contextmanager
    def _slots(self, make: Callable[[RegionCandidate], Any]) -> Iterator[None]:
        held = [(c.module, vars(c.module).get(_SLOT)) for c in self._chosen]
        for chosen in self._chosen:
            vars(chosen.module)[_SLOT] = make(chosen)
        try:
            yield
        finally:
            for module, before in held:
                vars(module)[_SLOT] = before


def set_by_hooks(module: torch.nn.Module, path: str) -> Iterator[str]:
    """Yields the paths of attributes that hooks within a module set in it, found in their bytecode,
    since the search does not run hooks."""
    paths = {id(m): n for n, m in module.named_modules(prefix=path)}
    for m in module.modules():
        for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            for hook in vars(m).get(kind, {}).values():
                owner, code = getattr(hook, "__self__", None), getattr(hook, "__code__", None)
                if id(owner) in paths and code is not None:
                    for step in dis.get_instructions(code):
                        if step.opname == "STORE_ATTR":
                            yield f"{paths[id(owner)]}.{step.argval}"


def first_line(error: BaseException) -> str:
    """Returns an error's reason in one line, of at most 300 characters."""
    text = getattr(error, "said", "") or str(error)
    text = text.removeprefix("the model cannot be captured: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:2])[:300] if lines else type(error).__name__


__all__ = ["RegionSearch", "first_line"]
