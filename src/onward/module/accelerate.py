"""accelerate: makes a module's calls run as a graph, in place.

nn.Module has a slot for a callable that replaces the forward, which `Module.compile` uses too. The
module stays the same object, with the same class, parameters and state_dict keys.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from onward.capture import CACHE as _CACHE
from onward.capture import (
    CacheSetting,
    CapturedModule,
    CaptureRequest,
    apart_from_hooks,
    called_in_inference_mode,
    eager,
    untraced,
    unwrapped,
    without_flash_lengths,
)
from onward.compile import Compiler
from onward.errors import CaptureError, EagerWarning, OnwardError, RegionError
from onward.execute import Memory
from onward.extend import load_plugins
from onward.forks import Lock
from onward.kernels import host
from onward.kernels.kernel import Launch
from onward.kernels.region import HeldParts
from onward.model_state.device import device_of, require_computing
from onward.module.arguments import bind_call
from onward.module.around import (
    Mode,
    autocast_off,
    goes_around,
    mode_here,
    surroundings,
    uses_cache,
)
from onward.module.delivery import deliver
from onward.module.gathered_shards import call_gathered, shards_of
from onward.module.hooks import aside, call_with_hooks, run_around
from onward.module.prepared_call import PreparedCall
from onward.module.run import RUNNING, CallRun
from onward.module.states import OFTEN, State, States, TooMany
from onward.options import ModuleOptions
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.planned_amount import planned_amount
from onward.prepare.region_warnings import WarnOnce
from onward.prepare.report import Report
from onward.prepare.session import Session

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)
_SLOT = "_compiled_call_impl"
CACHE = f"{_CACHE}; fix: config.use_cache = False where nobody generates"


class SharedMemory(Memory):
    """The memory that all accelerated modules on one device share; their plans run one at a
    time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lock = Lock()


# refused captures of one kind of batch, after which a state must be met often to get another
# capture
IN_VAIN = 3
_MEMORIES: weakref.WeakValueDictionary[torch.device, SharedMemory] = weakref.WeakValueDictionary()


def accelerate(model: AnyModule, **options: Any) -> AnyModule:
    """Makes calls of `model` run as a graph, forward and backward, and returns the model.

    options: the fields of `onward.ModuleOptions`; a second call changes them. Gradients come
    through autograd as always: `loss.backward()`, the optimizer, clipping, accumulation and hooks
    on parameters stay as they are. Raises OnwardError for anything but a module, and for a module
    compiled with `Module.compile`.
    """
    if not isinstance(model, torch.nn.Module):
        raise OnwardError(
            f"accelerate takes a torch.nn.Module, not a {type(model).__name__}; fix: pass the model"
        )
    load_plugins()
    held = vars(model).get(_SLOT)
    if held is not None and not isinstance(held, Accelerated):
        raise OnwardError(
            "the model is compiled already (model.compile()); fix: accelerate a model that is not"
        )
    vars(model)[_SLOT] = Accelerated(unwrapped(model), ModuleOptions(**options))
    return model


def accelerated(model: torch.nn.Module) -> Accelerated | None:
    """The Accelerated that runs the model's calls; None where it is not accelerated."""
    held = vars(model).get(_SLOT)
    return held if isinstance(held, Accelerated) else None


@dataclass(frozen=True)
class _Refused:
    """A call that has to run in eager PyTorch, and why. keep: called after eager PyTorch has run
    it, to refuse such calls at once; a call that eager refuses too is the caller's mistake and is
    not kept."""

    reason: str
    keep: Callable[[], None] = lambda: None


class Accelerated:
    """The callable that replaces a module's forward."""

    _torchdynamo_disable = True  # an outer torch.compile calls it without tracing it

    def __init__(self, model: torch.nn.Module, options: ModuleOptions) -> None:
        self._model = weakref.ref(model)  # weak, since the model holds this object
        self.options = options
        self._states = States()
        self._memory: SharedMemory | None = None
        self._lock: Lock | None = None  # the lock of that memory
        # by kind of batch: number of states with refused captures, the last such state, and the
        # reason
        self._in_vain: dict[Any, tuple[int, State | None, str]] = {}
        self._told: set[str] = set()
        self._told_regions = WarnOnce()
        self._last: PreparedCall | None = None
        parameters = inspect.signature(model.forward).parameters
        self.takes_cache, self.cache_setting = "use_cache" in parameters, CacheSetting()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "a module that is called is there"
        if goes_around():
            return model._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        if run_around(model):
            return call_with_hooks(model, partial(self._call, model), args, kwargs)
        return self._call(model, *args, **kwargs)

    def _call(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        shards = shards_of(model)
        if shards is None:
            return self._call_whole(model, args, kwargs)
        reason = shards.refusal()
        if reason is not None:
            return self._refused(model, args, kwargs, reason)
        call = partial(self._call_whole, model, args, kwargs)
        return call_gathered(model, shards, call, for_backward=torch.is_grad_enabled())

    def _call_whole(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The call of a model with whole parameters."""
        reason = surroundings()
        if reason is None and uses_cache(model, kwargs, self.takes_cache, self.cache_setting):
            return self._in_eager(model, args, kwargs, CACHE)
        if reason is None:
            try:
                batch = bind_call(args, without_flash_lengths(model, kwargs))
            except CaptureError as error:
                reason = str(error)
            else:
                found = self._as_graph(model, batch, mode_here(model))
                if not isinstance(found, _Refused):
                    return found
                if self.options.strict:
                    raise CaptureError(found.reason)
                outputs = self._in_eager(model, args, kwargs, found.reason)
                found.keep()
                return outputs
        return self._refused(model, args, kwargs, reason)

    # ---- graphs

    def _as_graph(self, model: torch.nn.Module, batch: Batch, mode: Mode) -> Any:
        """Runs the call as a graph; returns its outputs, or a _Refused where nothing has run."""
        state: State | None = None
        try:
            with self._locked_state(model) as (state, lock):
                call = self._find(model, batch, state, mode)
                if isinstance(call, str):
                    return _Refused(call)
                run = CallRun(call, batch, mode.grad, lock)
                run.prepare(call.wanted(self.options.outputs))
                self._last = call
                with _undone_where_refused(call):
                    return deliver(run, partial(_tensor_of, model), self.options.outputs)
        except TooMany as error:
            return _Refused(str(error))
        except CaptureError as error:
            reason = str(error)
            if state is None:
                return _Refused(reason)
            return _Refused(reason, partial(self._keep, state, batch, mode, reason))

    @contextmanager
    def _locked_state(self, model: torch.nn.Module) -> Generator[tuple[State, Lock]]:
        """A context that holds the lock of the memory on the model's device, which it enters with
        the state of the model and that lock. Raises CaptureError for a model without a state."""
        while True:
            lock = self._lock or self._moved(device_of(model))
            lock.require_whole(RUNNING)
            with lock, torch.inference_mode(False), autocast_off():
                state = self._states.now(model)
                if self._memory is not None and state.device == self._memory.device:
                    yield state, lock
                    return
                self._moved(state.device)

    def _keep(self, state: State, batch: Batch, mode: Mode, reason: str) -> None:
        """Records a refused capture, after eager PyTorch has run the call."""
        state.of(batch, mode).refuse(batch, reason)
        tries, last, _ = self._in_vain.get(batch.kind, (0, None, ""))
        self._in_vain[batch.kind] = tries + (last is not state), state, reason

    def _find(
        self, model: torch.nn.Module, batch: Batch, state: State, mode: Mode
    ) -> PreparedCall | str:
        """Returns the prepared call for batches like this one, made if there is none, or the known
        reason why they run in eager. Raises CaptureError for a reason found just now."""
        call = state.find(batch, mode)
        return self._make(model, batch, state, mode) if call is None else call

    def _make(self, model: torch.nn.Module, batch: Batch, state: State, mode: Mode) -> PreparedCall:
        tries, _, reason = self._in_vain.get(batch.kind, (0, None, ""))
        if tries >= IN_VAIN and state.met < OFTEN and not self._states.prepared(batch):
            raise TooMany(reason)
        state.refuse_more(batch, mode)
        compiler = Compiler(host(state.device), self.options.disable)
        trained = state.trained(batch, mode)
        captured = None if trained is None else compiler.evaluation(trained)
        captured = captured or self.capture(compiler, model, batch, mode)
        if captured.regions:
            self._told_regions.tell(model, captured.regions)
        if state.guards.settle(captured):
            state.calls.clear()
        assert self._memory is not None
        session = Session(self._memory, memory_budget=planned_amount(self.options, model))
        call = PreparedCall(batch, compiler, captured, session)
        self._in_vain.pop(batch.kind, None)
        state.of(batch, mode).add(call)
        return call

    def capture(
        self, compiler: Compiler, model: torch.nn.Module, batch: Batch, mode: Mode
    ) -> CapturedModule:
        """Captures the call of the model with all of its outputs."""
        # accelerated submodules become parts of this graph
        asked = called_in_inference_mode(mode.inference)
        with eager(), apart_from_hooks(), aside(model), asked:
            request = CaptureRequest(
                model,
                batch.args,
                batch.kwargs,
                want_loss=False,
                gradients=mode.grad,
                whole=True,
                regions=not self.options.strict,
                autocast=mode.autocast,
            )
            return compiler.capture(request)

    # ---- memory

    def _moved(self, device: torch.device) -> Lock:
        """Switches to the memory of a device; returns the lock of that memory. Raises CaptureError
        for a kind of device on which Onward does not compute."""
        require_computing(device)
        self._states.clear()
        found = _MEMORIES.get(device)
        if found is None:
            found = _MEMORIES[device] = SharedMemory(device)
        self._memory, self._lock = found, found.lock
        return found.lock

    # ---- eager

    def _refused(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: str
    ) -> Any:
        """Runs the call in eager PyTorch; with the option `strict`, raises CaptureError."""
        if self.options.strict:
            raise CaptureError(reason)
        return self._in_eager(model, args, kwargs, reason)

    def _in_eager(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: str
    ) -> Any:
        untraced()
        with eager(), aside(model):
            outputs = model._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        if reason not in self._told:  # not reached where eager PyTorch raises too
            self._told.add(reason)
            warnings.warn(
                f"{type(model).__name__} runs in eager PyTorch: {reason}",
                EagerWarning,
                stacklevel=5,
            )
        return outputs

    # ---- looking

    def report(self) -> Report:
        """Reports the last call, as `Trainer.report` reports a step. Raises OnwardError before the
        first call."""
        return self.last_call().report()

    @property
    def plan(self) -> Plan:
        """The last call's plan; print it to see every buffer. Raises OnwardError before the first
        call."""
        return self.last_call().plan

    @property
    def launches(self) -> list[Launch]:
        """The last call's bound launches, in the order of its plan, for measurements."""
        return self.last_call().launches

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None, "a module that is looked at is there"
        return model

    @property
    def memory(self) -> SharedMemory:
        """The memory in which the plans run."""
        with self.locked():
            assert self._memory is not None
            return self._memory

    def locked(self) -> Lock:
        """The lock of the memory; its holder runs alone."""
        return self._lock or self._moved(device_of(self.model))

    def find(self, batch: Batch) -> PreparedCall | str:
        """Returns the prepared call for batches like this one, made if there is none, or the known
        reason why they run in eager. Raises CaptureError for a reason found just now."""
        model, mode = self.model, mode_here(self.model)
        shards = shards_of(model)

        def found() -> PreparedCall | str:
            with self._locked_state(model) as (state, _):
                return self._find(model, batch, state, mode)

        if shards is None:
            return found()
        return call_gathered(model, shards, found, for_backward=False)

    def last_call(self) -> PreparedCall:
        """The prepared call that ran last. Raises OnwardError before the first call."""
        if self._last is None:
            raise OnwardError("no call has run as a graph yet; fix: call the model first")
        return self._last


@contextmanager
def _undone_where_refused(call: PreparedCall) -> Generator[None]:
    """A context that undoes a run in which a region raises RegionError, since its results do not
    fit the graph: buffers and attributes set by regions are restored, so that eager PyTorch can run
    the call."""
    parts = call.captured.regions
    buffers = [*call.written, *(b for part in parts for b in part.buffers())] if parts else []
    held = HeldParts(parts, buffers)
    try:
        yield
    except RegionError:
        held.put_back()
        raise


def _tensor_of(model: torch.nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer at a path of the model."""
    prefix, _, name = path.rpartition(".")
    return getattr(model.get_submodule(prefix), name)


__all__ = ["CACHE", "Accelerated", "accelerate", "accelerated"]
