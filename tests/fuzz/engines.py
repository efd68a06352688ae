"""The sides of a comparison: eager PyTorch in two precisions, and Onward in its variants."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from fuzz.maker import Case
from fuzz.source import OPTIONS, SCHEDULER, batch_name, definitions
from torch import nn
from torch.utils import _pytree as pytree

import onward
import onward.compile
import onward.prepare.packed_step
from onward.capture import CapturedModule, CaptureRequest
from onward.integrations.torch_compile import register
from onward.model_state import Walk

Tensors = dict[str, torch.Tensor]
CLOSE = 2**-6  # of a weight, two units of bf16: enough that all that is computed rounds anew
SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass
class Moment:
    """What can be seen after one action. `error`: what it raised. generator: torch's own, where it
    stands."""

    said: Tensors = field(default_factory=dict)  # loss, grad_norm, outputs
    state: Tensors = field(default_factory=dict)  # parameters, buffers, the optimizer's state
    error: Exception | None = None
    generator: bytes = b""


def namespace(case: Case) -> dict[str, Any]:
    """The case's own definitions: Model, optimizer_of, loss_fn, batches."""
    made: dict[str, Any] = {"__name__": "case"}
    exec(compile(definitions(case), f"<case {case['seed']}>", "exec"), made)
    return made


class Side:
    """A model, an optimizer and perhaps a scheduler, to which a history happens.

    whole: the model with what is around it.
    """

    def __init__(self, case: Case, defined: dict[str, Any], dtype: torch.dtype) -> None:
        self.case, self.defined, self.dtype = case, defined, dtype
        self.model: nn.Module = self.made_model().to(dtype)
        for name, path in case["aliases"]:  # a conversion makes two of a buffer that has two names
            if any(p["path"] == path and p["buffer"] for p in case["parameters"]):
                defined["put"](self.model, name, self.model.get_buffer(path))
        self.whole: nn.Module = defined["around"](self.model, self.face).to(dtype)
        self.optimizer: torch.optim.Optimizer = defined["optimizer_of"](self.whole)
        self.scheduler: Any = None

    def made_model(self) -> nn.Module:
        """The case's model, in fp32; under `close`, a seed, each weight differs a little."""
        model: nn.Module = self.defined["Model"]().train()
        if "close" in self.case:
            generator = torch.Generator().manual_seed(self.case["close"])
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.0 + CLOSE * torch.randn(p.shape, generator=generator))
        return model

    def face(self, model: nn.Module) -> nn.Module:
        """What Onward puts around the model."""
        return model

    def play(self) -> list[Moment]:
        """Moments of the whole history; torch's generator always starts alike."""
        torch.manual_seed(self.case["seed"])
        return [self.act(action) for action in self.case["history"]]

    def schedule(self) -> None:
        self.scheduler = eval(SCHEDULER, {"torch": torch, "optimizer": self.optimizer})

    def batch(self, action: dict[str, Any]) -> dict[str, Any]:
        found = self.defined[batch_name(action)]
        if "alias" in action:
            made = self.defined["aliased"](found, action["input"], self.model, action["alias"])
            return {k: v if k == action["input"] else self._cast(v) for k, v in made.items()}
        if action["do"] == "train":
            found = self.defined["collated"](found)
        return {k: self._cast(v) for k, v in found.items()}

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def act(self, action: dict[str, Any]) -> Moment:
        moment = Moment()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if action["do"] in ("train", "eval"):
                    moment.said = getattr(self, action["do"])(self.batch(action))
                elif action["do"] == "code":
                    names = {
                        "model": self.model, "optimizer": self.optimizer,
                        "scheduler": self.scheduler, "nn": nn, "copy": copy, "torch": torch,
                    }  # fmt: skip
                    exec(action["code"], names)
                else:
                    getattr(self, action["do"])()
        except Exception as error:
            moment.error = error
        moment.state = self.state()
        moment.generator = torch.get_rng_state().numpy().tobytes()
        return moment

    def state(self) -> Tensors:
        found = {f"parameter {n}": p for n, p in self.whole.named_parameters()}
        found |= {f"buffer {n}": b for n, b in self.whole.named_buffers()}
        if self.case["wrap"]:
            found |= {f"key {n}": torch.ones(()) for n in self.whole.state_dict()}
        for n, p in self.whole.named_parameters():
            for slot in SLOTS:
                x = self.optimizer.state.get(p, {}).get(slot)
                if x is not None:
                    found[f"{slot} {n}"] = x
            step = self.optimizer.state.get(p, {}).get("step")
            if step is not None:
                found[f"step {n}"] = torch.as_tensor(float(step))
        # plain tensors: torch cannot subtract tensors of two copies of a class that the program
        # defines
        return {n: x.detach().as_subclass(torch.Tensor).clone() for n, x in found.items()}

    def train(self, batch: dict[str, Any]) -> Tensors:
        raise NotImplementedError

    def eval(self, batch: dict[str, Any]) -> Tensors:
        raise NotImplementedError

    def reload(self) -> None: ...

    def rebirth(self) -> None: ...

    def save(self) -> None:
        """Save the model in the middle of a run, as a user does."""
        if isinstance(self.model, transformers.PreTrainedModel):
            with tempfile.TemporaryDirectory() as folder:
                self.model.save_pretrained(folder)
        else:
            torch.save(self.whole.state_dict(), io.BytesIO())


class Eager(Side):
    """The plain loop. mixed: a variant; forwards have its precision by torch.autocast, and losses
    its scale."""

    def __init__(
        self,
        case: Case,
        defined: dict[str, Any],
        dtype: torch.dtype,
        mixed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(case, defined, dtype)
        self.micro, self.low = 0, LOW.get((mixed or {}).get("mixed_precision", ""))
        self.scale: float = (mixed or {}).get("loss_scale", 1.0)
        if case["scheduler"]:
            self.schedule()

    def loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Tensors]:
        with torch.autocast("cpu", self.low, enabled=self.low is not None):
            return self._loss(batch)

    def _loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Tensors]:
        if self.case["loss_fn"]:
            y = batch.pop("labels")
            out = self.called()(**batch)
            return self.defined["loss_fn"](out, y), out if isinstance(out, dict) else {}
        outputs = self.called()(**batch)
        if isinstance(outputs, torch.Tensor):
            return outputs, {}
        return outputs["loss"], outputs

    def called(self) -> Callable[..., Any]:
        return self.whole

    def train(self, batch: dict[str, Any]) -> Tensors:
        n, limit = (
            self.case["options"][k] for k in ("gradient_accumulation_steps", "max_grad_norm")
        )
        self.whole.train()
        if self.micro == 0:
            self.optimizer.zero_grad()
        loss, outputs = self.loss(batch)
        (loss / n * self.scale).backward()
        said = {
            "loss": loss
        }  # copies: an output may be a view of a parameter, as Onward's never is
        said |= {f"output {k}": outputs[k].detach().clone() for k in self.case["fetch"]}
        self.micro = (self.micro + 1) % n
        if self.micro == 0:
            kept = [p for g in self.optimizer.param_groups for p in g["params"]]
            for p in kept if self.scale != 1.0 else ():
                if p.grad is not None:
                    p.grad.div_(self.scale)
            if limit is not None:
                said["grad_norm"] = nn.utils.clip_grad_norm_(kept, limit)
            self.optimizer.step()
        return {k: x.detach().clone() for k, x in said.items()}

    def eval(self, batch: dict[str, Any]) -> Tensors:
        flags = [(m, m.training) for m in self.whole.modules()]
        try:
            self.whole.eval()
            with torch.no_grad():
                loss, outputs = self.loss(batch)
        finally:
            for module, flag in flags:
                module.training = flag
        return {"loss": loss} | {f"output {k}": outputs[k] for k in self.case["fetch"]}


class Ours(Side):
    """An Onward Trainer, in one variant."""

    def __init__(self, case: Case, defined: dict[str, Any], variant: dict[str, Any]) -> None:
        super().__init__(case, defined, torch.float32)
        self.variant = variant
        if case["scheduler"] == "before":
            self.schedule()
        self.trainer = self.made()
        if case["scheduler"] == "after":
            self.schedule()

    def made(self) -> onward.Trainer:
        said = {k: v for k, v in self.variant.items() if k in OPTIONS}
        said["disable"] = tuple(said.get("disable", ()))
        options = onward.TrainerOptions(
            **said,
            # the plain loop takes the mean of the micro-batches' losses
            **{"gradient_accumulation_average": "micro_batches", **self.case["options"]},
            seed=3 if self.case["seeded"] else None,
            fetch=tuple(self.case["fetch"]),
        )
        return onward.Trainer(self.whole, self.optimizer, self.defined["loss_fn"], options=options)

    def train(self, batch: dict[str, Any]) -> Tensors:
        if self.case["call"] == "mapping":
            result = self.trainer.train_step(batch)
        else:
            result = self.trainer.train_step(**batch)
        said = {"loss": result.loss} | {f"output {k}": x for k, x in result.outputs.items()}
        if result.grad_norm is not None:
            said["grad_norm"] = result.grad_norm
        return said

    def eval(self, batch: dict[str, Any]) -> Tensors:
        result = self.trainer.eval_step(batch, fetch=self.case["fetch"])
        return {"loss": result.loss} | {f"output {k}": x for k, x in result.outputs.items()}

    def reload(self) -> None:
        self.trainer.load_state_dict(self.trainer.state_dict())

    def face(self, model: nn.Module) -> nn.Module:
        return onward.Module(model) if self.case["face"] == "Module" else model

    def rebirth(self) -> None:
        """Resume as a new process would: new objects that load the state."""
        state = copy.deepcopy(self.trainer.state_dict())
        with torch.random.fork_rng():  # a model's beginning is no part of the run
            self.model = self.made_model()
            self.whole = self.defined["around"](self.model, self.face)
        self.optimizer = self.defined["optimizer_of"](self.whole)
        self.trainer = self.made()
        self.trainer.load_state_dict(state)


class OurModule(Eager):
    """The plain loop, with the model accelerated."""

    def __init__(self, case: Case, defined: dict[str, Any], variant: dict[str, Any]) -> None:
        self.disable = tuple(variant.get("disable", ()))
        super().__init__(case, defined, torch.float32)

    def face(self, model: nn.Module) -> nn.Module:
        own = onward.Module if self.case["face"] == "Module" else onward.accelerate
        return own(model, disable=self.disable)


class OurCompiled(Eager):
    """The plain loop, with the model compiled by torch.compile with Onward as its backend."""

    def __init__(self, case: Case, defined: dict[str, Any], variant: dict[str, Any]) -> None:
        super().__init__(case, defined, torch.float32)
        torch._dynamo.reset()
        register()
        self._compiled = torch.compile(self.whole, backend="onward")

    def called(self) -> Callable[..., Any]:
        return self._compiled


LOOPS = {"module": OurModule, "compiled": OurCompiled}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def ours_of(case: Case, defined: dict[str, Any], variant: dict[str, Any]) -> Side:
    return LOOPS.get(variant.get("loop", ""), Ours)(case, defined, variant)


# ---- variants: what a whole process would set


@contextlib.contextmanager
def variant_set(variant: dict[str, Any]) -> Iterator[None]:
    """The environment of a variant."""
    changes = {}
    if "native" in variant:
        changes["ONWARD_NATIVE"] = variant["native"]
    if variant.get("check"):
        changes["ONWARD_CHECK"] = "1"
    before = {k: os.environ.get(k) for k in changes}
    pays = onward.prepare.packed_step.PackedStep.pays
    os.environ.update(changes)
    if "native" in variant:
        _clear()
    if variant.get("always"):
        onward.prepare.packed_step.PackedStep.pays = lambda self, dims: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        onward.prepare.packed_step.PackedStep.pays = pays  # type: ignore[method-assign]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if "native" in variant:
            _clear()


def _clear() -> None:
    from onward.kernels.blas.choice import _fastest, rates
    from onward.kernels.blas.engines import engines
    from onward.kernels.native.library import library

    for cached in (library, engines, rates, _fastest):
        cached.cache_clear()


class Captures:
    """Captures of a first run, used again by the variants: an export costs more than all the rest.

    The n-th capture of a variant is the n-th of the first run, its tensors those of the variant's
    model at the same paths; where anything does not fit, or the forward leaves something in the
    model, it is captured afresh.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, CapturedModule, dict[str, str]]] = []
        self.real = onward.compile.capture
        self.count = self.made = 0  # of the run that is on: tried, and those that were no refusal

    def of(self, variant: dict[str, Any], number: int) -> AbstractContextManager[None]:
        """A context for run `number` of the variant: the first is recorded, later ones replay
        it."""
        self.count = self.made = 0
        if "loop" in variant:  # which captures calls, no steps
            return self._patched(self.real)
        return self.replaying() if number else self.recording()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def record(request: CaptureRequest) -> CapturedModule:
            model = request.model
            before = Walk(model, None).facts
            found = self.real(request)
            # captures of a forward that leaves something, or that runs a part of this model, serve
            # no other model
            if Walk(model, None).facts != before or found.regions:
                self.kept.append((None, found, {}))
                return found
            paths = {id(x): n for n, x in _named(model).items()}
            names = {n: paths.get(id(x), "") for n, x in found.owned.items()}
            self.kept.append((_key(request), _copy(found), names))
            return found

        with self._patched(record):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        rest = iter(self.kept)

        def replay(request: CaptureRequest) -> CapturedModule:
            key, found, names = next(rest, (None, None, {}))
            live = _named(request.model)
            if (
                found is None
                or Walk(
                    request.model, None
                ).plain  # of which the capture says what it has read of these
                or key != _key(request)
                or any(n not in live for n in names.values())
            ):
                return self.real(request)
            own: dict[str, Any] = {n: live[path] for n, path in names.items()}
            return _copy(
                found,
                parameters={n: own[n] for n in found.parameters},
                buffers={n: own[n] for n in found.buffers},
            )

        with self._patched(replay):
            yield

    @contextlib.contextmanager
    def _patched(self, function: Callable[[CaptureRequest], CapturedModule]) -> Iterator[None]:
        def counting(request: CaptureRequest) -> CapturedModule:
            self.count += 1
            found = function(request)
            self.made += 1
            return found

        onward.compile.capture = counting
        try:
            yield
        finally:
            onward.compile.capture = self.real


def _copy(found: CapturedModule, **changes: Any) -> CapturedModule:
    made = copy.copy(found)
    made.graph = found.graph.clone()
    made.notes = list(found.notes)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def _named(model: nn.Module) -> Tensors:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def _key(request: CaptureRequest) -> Any:
    """What a capture depends on, as far as one history differs from another run of itself."""
    model, given = request.model, (request.args, request.kwargs, request.target)
    leaves = pytree.tree_leaves(given)
    tensors = [(x.dtype, tuple(x.shape)) for x in leaves if isinstance(x, torch.Tensor)]
    own = [
        (n, tuple(x.shape), x.stride(), x.requires_grad, str(vars(x)))
        for n, x in _named(model).items()
    ]
    return model.training, tensors, own
