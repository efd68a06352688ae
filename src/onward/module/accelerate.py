"""accelerate: a module whose calls run as a graph, in place.

`nn.Module` has a slot for what is called in the place of its forward, which `Module.compile` fills
too. The module stays what it is: same object, same class, same parameters, same keys.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from onward.capture import CapturedModule, apart_from_hooks, without_flash_lengths
from onward.compile import Compiler
from onward.config import CaptureError, EagerWarning, ModuleOptions, OnwardError
from onward.execute import Memory
from onward.explanation import StepExplanation
from onward.extend import load_plugins
from onward.kernels import host
from onward.module.arguments import bind_call
from onward.module.around import eager, goes_around, surroundings, uses_cache
from onward.module.delivery import deliver
from onward.module.hooks import aside, call_with_hooks, run_around
from onward.module.prepared_call import PreparedCall
from onward.module.run import Run
from onward.module.states import State, States
from onward.plan import Plan
from onward.train.batch import Batch
from onward.train.regions import Told
from onward.train.report import Report
from onward.train.session import Session

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)
_SLOT = "_compiled_call_impl"
CACHE = "a cache of keys and values is in use (generation)"


class SharedMemory(Memory):
    """Of all accelerated modules on a device: their plans run one at a time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lock = threading.RLock()


_MEMORIES: weakref.WeakValueDictionary[torch.device, SharedMemory] = weakref.WeakValueDictionary()


def accelerate(model: AnyModule, **options: Any) -> AnyModule:
    """Makes the calls of `model` run as a graph, forward and backward, and returns it.

    options: the fields of `onward.ModuleOptions`. Gradients come through autograd as always:
    `loss.backward()`, the optimizer, clipping, accumulation and hooks on parameters stay as they
    are. A second time changes the options. Raises OnwardError for what is no module, and for one
    that `torch.compile` has been given.
    """
    if not isinstance(model, torch.nn.Module):
        raise OnwardError(
            f"accelerate takes a torch.nn.Module, not a {type(model).__name__}; fix: give the model"
        )
    load_plugins()
    held = vars(model).get(_SLOT)
    if held is not None and not isinstance(held, Accelerated):
        raise OnwardError(
            "the model is compiled already (Module.compile); fix: accelerate a model that is not"
        )
    vars(model)[_SLOT] = Accelerated(model, ModuleOptions(**options))
    return model


def accelerated(model: torch.nn.Module) -> Accelerated | None:
    """What runs the model's calls, where it is accelerated."""
    held = vars(model).get(_SLOT)
    return held if isinstance(held, Accelerated) else None


class Accelerated:
    """What is called in the place of a module's forward."""

    _torchdynamo_disable = True  # torch.compile around it leaves it as it is

    def __init__(self, model: torch.nn.Module, options: ModuleOptions) -> None:
        self._model = weakref.ref(model)  # which holds this
        self.options = options
        self._states = States()
        self._memory: SharedMemory | None = None
        self._told: set[str] = set()
        self._told_regions = Told()
        self._last: PreparedCall | None = None
        parameters = inspect.signature(model.forward).parameters
        self.takes_cache = "use_cache" in parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "a module that is called is there"
        if goes_around():
            return model._call_impl(*args, **kwargs)
        if run_around(model):
            return call_with_hooks(model, partial(self._call, model), args, kwargs)
        return self._call(model, *args, **kwargs)

    def _call(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        reason = surroundings()
        if reason is None and uses_cache(model, kwargs, self.takes_cache):
            return self._in_eager(model, args, kwargs, CACHE)
        try:
            if reason is not None:
                raise CaptureError(reason)
            batch = bind_call(args, without_flash_lengths(model, kwargs))
            found = self._find(model, batch)
        except CaptureError as error:
            if self.options.strict:
                raise
            return self._in_eager(model, args, kwargs, str(error))
        if isinstance(found, str):
            return self._in_eager(model, args, kwargs, found)
        return self._run(model, found, batch)

    # ---- graphs

    def _find(self, model: torch.nn.Module, batch: Batch) -> PreparedCall | str:
        """The call for batches like this one, made where there is none; or why such calls run in
        eager. Raises CaptureError where that is not known yet."""
        grad = torch.is_grad_enabled()  # which the next line may change
        with self._locked(model), torch.inference_mode(False):
            state = self._states.now(model)
            key = (state.flags(), grad, batch.kind)
            found = state.calls.get(key, [])
            if isinstance(found, str):
                if self.options.strict:
                    raise CaptureError(found)
                return found
            for call in found:
                if call.fits(batch):
                    return call
            try:
                return self._make(model, batch, state, key, grad)
            except CaptureError as error:
                if not found:
                    self._states.now(model).calls[key] = str(error)
                raise

    def _make(
        self, model: torch.nn.Module, batch: Batch, state: State, key: Any, grad: bool
    ) -> PreparedCall:
        compiler = Compiler(host(self._device(model).type), self.options.disable)
        captured = self.capture(compiler, model, batch, grad)
        if captured.regions:
            self._told_regions.tell(model, captured.regions)
        if state.guards.settle(captured):
            state.calls.clear()
        assert self._memory is not None
        session = Session(self._memory, memory_budget=self.options.memory_budget)
        call = PreparedCall(batch, compiler, captured, session)
        calls = state.calls.setdefault(key, [])
        assert isinstance(calls, list)
        calls.append(call)
        return call

    def capture(
        self, compiler: Compiler, model: torch.nn.Module, batch: Batch, grad: bool
    ) -> CapturedModule:
        """The call of the model with all that it returns."""
        # accelerated modules within it are parts of the graph
        with eager(), apart_from_hooks(), aside(model):
            return compiler.capture(
                model,
                batch.args,
                batch.kwargs,
                want_loss=False,
                gradients=grad,
                whole=True,
                regions=not self.options.strict,
            )

    def _run(self, model: torch.nn.Module, call: PreparedCall, batch: Batch) -> Any:
        assert self._memory is not None, "it was needed to find the call"
        grad, outputs, seed = torch.is_grad_enabled(), self.options.outputs, None
        self._last = call
        if call.draws():
            seed = torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu")
        with self._memory.lock, torch.inference_mode(False):
            run = Run(call, batch, call.wanted(outputs), seed, self._memory.lock)
            return deliver(run, call, batch, grad, partial(_tensor_of, model), outputs)

    # ---- memory

    def _locked(self, model: torch.nn.Module) -> threading.RLock:
        device = self._device(model)
        if self._memory is None or self._memory.device != device:
            self._states.clear()
            found = _MEMORIES.get(device)
            if found is None:
                found = _MEMORIES[device] = SharedMemory(device)
            self._memory = found
        return self._memory.lock

    @staticmethod
    def _device(model: torch.nn.Module) -> torch.device:
        first = next(model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    # ---- eager

    def _in_eager(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: str
    ) -> Any:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"{type(model).__name__} runs in eager PyTorch: {reason}",
                EagerWarning,
                stacklevel=5,
            )
        with eager(), aside(model):
            return model._call_impl(*args, **kwargs)

    # ---- looking

    def report(self) -> Report:
        """Of the last call, as `Trainer.report`."""
        return self.last_call().report()

    @property
    def plan(self) -> Plan:
        """The last call's plan; print it to see every buffer."""
        return self.last_call().plan

    def explain(
        self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> StepExplanation:
        """A training step of the model, or the last call's; see `onward.explain`."""
        from onward.module.explain import explain

        return explain(self.model, batch, kwargs, **options)

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None, "a module that is looked at is there"
        return model

    @property
    def memory(self) -> SharedMemory:
        """In which its plans run."""
        with self.locked():
            assert self._memory is not None
            return self._memory

    def locked(self) -> threading.RLock:
        """The lock of the memory: whoever holds it runs alone."""
        return self._locked(self.model)

    def find(self, batch: Batch) -> PreparedCall | str:
        """The call for batches like this one, or why such calls run in eager. Raises CaptureError
        where that was not known before."""
        return self._find(self.model, batch)

    def last_call(self) -> PreparedCall:
        """Raises OnwardError before the first."""
        if self._last is None:
            raise OnwardError("nothing has run as a graph yet; fix: call the model first")
        return self._last


def _tensor_of(model: torch.nn.Module, path: str) -> torch.Tensor:
    """A parameter or buffer."""
    prefix, _, name = path.rpartition(".")
    return getattr(model.get_submodule(prefix), name)


__all__ = ["CACHE", "Accelerated", "accelerate", "accelerated"]
