"""onward.Module within other modules, and as a module itself: one name for each tensor, the one
that it has without a wrapper, and every method of nn.Module acts on the model.

The oracle is the same model without a wrapper.
"""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.utils import parametrizations, parametrize, prune
from twins import CLOSE, assert_same

import onward
from onward.module import accelerated

W = 4
_load = torch.load  # noqa: TID251


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, W, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """A model with parameters and buffers of its own, submodules, tied weights and a list."""

    shift: torch.Tensor
    passing: torch.Tensor
    owner: Any

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))
        self.register_buffer("shift", torch.zeros(W))
        self.register_buffer("passing", torch.ones(W), persistent=False)
        self.layers = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])
        self.norm = nn.BatchNorm1d(W)
        self.tied, first = nn.Linear(W, W, bias=False), nn.Linear(W, W)
        self.layers[0] = first
        self.tied.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(self.norm(x) * self.scale + self.shift * self.passing)


class WithState(Net):
    """A model with an extra state beside its tensors, and a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Renaming(Net):
    """A model whose state_dict renames some keys."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        for key in [k for k in found if k.startswith(prefix + "norm.")]:
            found[prefix + "batch_" + key.removeprefix(prefix)] = found.pop(key)
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        for key in [k for k in state if k.startswith(prefix + "batch_")]:
            state[prefix + key.removeprefix(prefix + "batch_")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *args)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


Wrap = Callable[[nn.Module], nn.Module]


def _twice(m: nn.Module) -> nn.Module:
    return onward.Module(onward.Module(m))


def _nested(wrap: Wrap) -> nn.Module:
    """A wrapped model within a wrapped model, within another."""
    return Outer(wrap(Outer(wrap(Net()))))


def _listed(wrap: Wrap) -> nn.Module:
    return nn.Sequential(*nn.ModuleList(wrap(Net()) for _ in range(2)))


def _shared(wrap: Wrap) -> nn.Module:
    """One model in two wrappers."""
    net = Net()
    return nn.Sequential(wrap(net), nn.Linear(W, W), wrap(net))


MODELS: dict[str, Callable[[Wrap], nn.Module]] = {
    "itself": lambda wrap: wrap(Net()),
    "a leaf itself": lambda wrap: wrap(nn.Linear(W, W)),
    "within": lambda wrap: Outer(wrap(Net())),
    "a leaf within": lambda wrap: Outer(wrap(nn.Linear(W, W))),
    "a sequence within": lambda wrap: Outer(wrap(nn.Sequential(nn.Linear(W, W), nn.ReLU()))),
    "nested": _nested,
    "in a list": _listed,
    "one model twice": _shared,
    "extra state": lambda wrap: Outer(wrap(WithState())),
    "own names": lambda wrap: Outer(wrap(Renaming())),
}
WRAPS: dict[str, Wrap] = {"once": onward.Module, "twice": _twice}


def pair(kind: str, wrap: Wrap = onward.Module) -> tuple[Any, Any]:
    """The model with wrappers, and an equal one without."""
    made = []
    for how in (wrap, lambda m: m):
        torch.manual_seed(0)
        made.append(MODELS[kind](how))
    return made[0], made[1]


NAMES: dict[str, Callable[[Any], list[str]]] = {
    "state_dict": lambda m: list(m.state_dict()),
    "versions": lambda m: [f"{k} {v}" for k, v in m.state_dict()._metadata.items()],
    "parameters": lambda m: [n for n, _ in m.named_parameters()],
    "all parameters": lambda m: [n for n, _ in m.named_parameters(remove_duplicate=False)],
    "buffers": lambda m: [n for n, _ in m.named_buffers()],
    "modules": lambda m: [f"{n} {k.__class__.__name__}" for n, k in m.named_modules()],
    "all modules": lambda m: [n for n, _ in m.named_modules(remove_duplicate=False)],
    "_modules": lambda m: list(_walk(m, "")),
    "children": lambda m: [n for n, _ in m.named_children()],
    "getattr": lambda m: [n for n, p in m.named_parameters() if _reached(m, n) is p],
    "get_parameter": lambda m: [n for n, p in m.named_parameters() if m.get_parameter(n) is p],
    "get_submodule": lambda m: [
        n for n, k in m.named_modules() if vars(m.get_submodule(n)) is vars(k)
    ],
    "DCP": lambda m: sorted(dcp.get_model_state_dict(m)),
    "DCP's walk": lambda m: sorted(map(str, dcp._iterate_valid_model_state(m))),
}


def _walk(module: Any, prefix: str) -> Iterator[str]:
    """Names of parameters and buffers, read from the private dicts as FSDP and DeepSpeed read
    them."""
    for name in ("_parameters", "_buffers"):
        yield from (prefix + key for key in getattr(module, name))
    for name, child in module._modules.items():
        yield from _walk(child, f"{prefix}{name}.")


def _reached(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", MODELS)
def test_names(kind: str, wrap: str) -> None:
    ours, plain = pair(kind, WRAPS[wrap])
    for what, names in NAMES.items():
        if (kind, what[:3]) == ("own names", "DCP"):
            continue  # DCP has no such models
        found, want = names(ours), names(plain)
        if what == "DCP's walk":
            found, want = [[s.split("0x")[0] for s in each] for each in (found, want)]
        assert found == want, what


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_saved_is_loaded(kind: str, wrap: str, tmp_path: Path) -> None:
    """Each way of saving is read by each way of loading, with and without wrappers on either
    side."""
    ours, plain = pair(kind, WRAPS[wrap])
    for source in (ours, plain):
        for p in source.parameters():
            nn.init.normal_(p)
        saved = io.BytesIO()
        torch.save(source.state_dict(), saved)
        saved.seek(0)
        states = {"torch.save": _load(saved, weights_only=True), "itself": source.state_dict()}
        for target in (ours, plain):
            for how, state in states.items():
                for p in target.parameters() if target is not source else ():
                    nn.init.zeros_(p)
                assert not any(map(len, target.load_state_dict(state))), how
                _same_state(target, source)
            if kind != "own names":
                dcp.set_model_state_dict(target, dcp.get_model_state_dict(source))
                _same_state(target, source)
    assert_same(ours(x()), plain(x()))


def _same_state(one: Any, other: Any) -> None:
    for (n, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, n


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", [k for k in MODELS if k != "own names"])
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_of_before(kind: str, wrap: str, assign: bool) -> None:
    """Checkpoints of older versions are read, whose keys have `module.` in the place of a
    wrapper."""
    ours, plain = pair(kind, WRAPS[wrap])
    owners = {n for n, m in _wrappers(ours, "")}
    old = {}
    for key, value in plain.state_dict().items():
        owner = max((o for o in owners if key.startswith(o)), key=len, default=None)
        for inner in sorted(owners, key=len, reverse=True):
            if owner is not None and key.startswith(inner):
                key = inner + "module." * (2 if wrap == "twice" else 1) + key[len(inner) :]
        old[key] = value.clone() + 1 if isinstance(value, torch.Tensor) else value
    assert owners and any("module." in key for key in old)
    assert not any(map(len, ours.load_state_dict(old, assign=assign)))
    assert any("module." in key for key in old), "the caller's own"
    for key, value in plain.state_dict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours.state_dict()[key], value + 1)


def _wrappers(module: Any, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, onward.Module) and type(module) is onward.Module:
        yield prefix, module
    for name, child in module._modules.items():
        yield from _wrappers(child, f"{prefix}{name}.")


def test_other_names_stay_unexpected() -> None:
    ours, plain = pair("within")
    state = {**plain.state_dict(), "inner.module.none": torch.zeros(1)}
    for model in (ours, plain):
        found = model.load_state_dict(state, strict=False)
        assert not found.missing_keys and len(found.unexpected_keys) == 1
    both = {**plain.state_dict(), "inner.module.scale": torch.zeros(W)}
    assert ours.load_state_dict(both, strict=False).unexpected_keys == ["inner.module.scale"]


def test_a_model_with_a_submodule_of_that_name() -> None:
    """A model's own submodule named `module` keeps its keys, and `wrapper.module` is still the
    model."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(W, W)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    ours, plain = Outer(onward.Module(Holder())), Outer(Holder())
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert not any(map(len, ours.load_state_dict(plain.state_dict())))
    assert_same(ours(x()), plain(x()))


# ---- the face of nn.Module


class Seen(nn.Module):
    """A module that logs which methods are called on it."""

    log: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.register_buffer("held", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.held


def _noted(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        Seen.log.append(name)
        return getattr(nn.Module, name)(self, *args, **kwargs)

    return method


def _hook(*given: Any) -> None:
    return None


CALLS: dict[str, tuple[Any, ...]] = {
    "T_destination": (), "call_super_init": (), "dump_patches": (),
    "add_module": ("more", nn.Linear(1, 1)), "apply": (_hook,), "bfloat16": (), "buffers": (),
    "children": (), "compile": (), "cpu": (), "cuda": (), "double": (), "eval": (),
    "extra_repr": (), "float": (), "forward": (x(),), "get_buffer": ("held",),
    "get_extra_state": (), "get_parameter": ("inner.weight",), "get_submodule": ("inner",),
    "half": (), "ipu": (), "load_state_dict": ({}, False), "modules": (), "mtia": (),
    "named_buffers": (), "named_children": (), "named_modules": (), "named_parameters": (),
    "parameters": (), "register_backward_hook": (_hook,), "register_buffer": ("b", x()),
    "register_forward_hook": (_hook,), "register_forward_pre_hook": (_hook,),
    "register_full_backward_hook": (_hook,), "register_full_backward_pre_hook": (_hook,),
    "register_load_state_dict_post_hook": (_hook,), "register_load_state_dict_pre_hook": (_hook,),
    "register_module": ("more", nn.Linear(1, 1)), "register_parameter": ("p", nn.Parameter(x())),
    "register_state_dict_post_hook": (_hook,), "register_state_dict_pre_hook": (_hook,),
    "requires_grad_": (False,), "set_extra_state": (None,),
    "set_submodule": ("inner", nn.Linear(W, W)), "share_memory": (), "state_dict": (),
    "to": (torch.float64,), "to_empty": (), "train": (), "type": (torch.float64,), "xpu": (),
    "zero_grad": (), "_apply": (lambda t: t.double(),), "_named_members": (lambda m: [],),
    "_register_state_dict_hook": (_hook,), "_register_load_state_dict_pre_hook": (_hook,),
    "_get_backward_hooks": (), "_get_backward_pre_hooks": (), "_get_name": (),
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Any]] = {"to_empty": {"device": "cpu"}}


def test_every_method_of_torch_is_in_the_table() -> None:
    """Methods that other packages add to nn.Module are left out."""
    held = {n: getattr(nn.Module, n) for n in dir(nn.Module) if not n.startswith("_")}
    own = {n for n, x in held.items() if getattr(x, "__module__", "torch").startswith("torch")}
    assert own <= CALLS.keys()


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", [n for n in CALLS if callable(getattr(nn.Module, n))])
def test_methods_are_the_model_s(name: str, wrap: str) -> None:
    """A method that the model's class overrides is called through the wrapper, with the same
    effects."""
    if name == "T_destination":
        return  # a type
    spied: Any = type("Spied", (Seen,), {} if name == "forward" else {name: _noted(name)})
    told = []
    for how in (WRAPS[wrap], lambda m: m):
        Seen.log = []
        torch.manual_seed(0)
        plain = spied()
        model = how(plain)
        before = [k for k in vars(plain) if k != "_compiled_call_impl"]
        try:
            args = copy.deepcopy(CALLS[name])
            found = getattr(model, name)(*args, **KEYWORDS.get(name, {}))
            if isinstance(found, Iterator):
                found = [*found]
            said = "itself" if found is model else _said(found)
        except Exception as error:
            said = type(error).__name__, str(error)
        held = {k: _said(v) for k, v in vars(plain).items() if k in before}
        told.append((said, Seen.log, held))
        if said != "itself":
            vars(plain).pop("_compiled_call_impl", None)  # of compile
    assert told[0] == told[1]
    assert name == "forward" or name in told[1][1]


def _said(value: Any) -> Any:
    """A value in a form that can be compared with that of another run."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, nn.Module):
        held = [_said(p) for p in value.parameters()]
        return value.__class__.__name__, list(value._modules), held, value.training
    if isinstance(value, dict):
        return type(value), [(k if isinstance(k, str) else "#", _said(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set)):
        return type(value), [_said(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value)


# ---- what others do to a module


def _pruned(m: Any) -> None:
    prune.l1_unstructured(m, "weight", amount=0.3)


def _replaced(m: Any) -> None:
    m.weight = nn.Parameter(m.weight.detach() * 2)


def _deleted(m: Any) -> None:
    del m.bias
    m.bias = nn.Parameter(torch.ones(W))


def _hooked(m: Any) -> None:
    m.register_forward_hook(lambda m, args, out: out + m.weight.sum())
    m.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


def _forward_replaced(m: Any) -> None:
    m.forward = (lambda forward: lambda x: forward(x) * 2)(m.forward)


def _other_class(m: Any) -> None:
    class Doubled(m.__class__):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    m.__class__ = Doubled


ACTS: dict[str, Callable[[Any], Any]] = {
    "pruned": _pruned, "replaced": _replaced, "deleted": _deleted, "hooks": _hooked,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrization": lambda m: parametrize.register_parametrization(m, "weight", nn.Softplus()),
    "forward replaced": _forward_replaced,
    "class": _other_class,
    "buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "double": lambda m: m.double().float(),
    "frozen": lambda m: m.requires_grad_(False),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("called", [False, True], ids=["at first", "after a call"])
@pytest.mark.filterwarnings("ignore:a part of ParametrizedLinear:onward.errors.EagerWarning")
def test_what_is_done_to_the_wrapper_is_done_to_the_model(
    act: str, wrap: str, called: bool
) -> None:
    outs = []
    for how in (WRAPS[wrap], lambda m: m):
        torch.manual_seed(0)
        plain = nn.Linear(W, W)
        model: Any = Outer(how(plain))
        if called:
            model(x())
        ACTS[act](model.inner)
        names = [n for n, _ in model.named_parameters()], list(model.state_dict())
        outs.append((model(x(1)), model.inner(x(2)), plain(x(2)), names))
    assert outs[0][3] == outs[1][3]
    for ours, eager in zip(outs[0][:3], outs[1][:3], strict=True):
        assert_same(ours, eager)


def test_children_that_are_exchanged() -> None:
    ours, plain = pair("within")
    for model in (ours, plain):
        torch.manual_seed(1)
        model.inner.norm = nn.Identity()
        model.inner.layers[1] = nn.Linear(W, W)
        model.inner.more = nn.Linear(W, W)
        del model.inner.more
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert_same(ours(x()), plain(x()))


# ---- copies


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


def _saved(m: Any) -> Any:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return _load(file, weights_only=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", [*COPIES, "torch.save"])
@pytest.mark.parametrize("kind", MODELS)
def test_copies(kind: str, how: str) -> None:
    ours, plain = pair(kind)
    twin = {**COPIES, "torch.save": _saved}[how](ours)
    assert list(twin.state_dict()) == list(plain.state_dict())
    names = [[n for n, _ in _wrappers(m, "")] for m in (twin, ours)]
    assert names[0] == names[1] and names[0]
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in ours.parameters()}
    for _, each in _wrappers(twin, ""):
        wrapper: Any = each
        held = accelerated(wrapper.module)
        assert held is not None and held.model is wrapper.module
        assert vars(wrapper) is vars(wrapper.module)
    assert_same(twin(x()), plain(x()))


def test_a_pickle_of_before() -> None:
    """A pickle of an older wrapper, which held its model as a submodule, can still be read."""
    state = vars(nn.Module()) | {"_modules": {"module": Net()}, "_onward_options": {"strict": True}}
    old = onward.Module.__new__(onward.Module)
    old.__setstate__(state)
    held = accelerated(old.module)
    assert held is not None and held.options.strict
    assert list(old.state_dict()) == list(Net().state_dict())


def test_a_model_that_knows_its_wrapper() -> None:
    model = Net()
    wrapper: Any = onward.Module(model)
    object.__setattr__(model, "owner", wrapper)
    for copied in COPIES.values():
        for twin in (copied(wrapper), copied(model).owner):
            assert vars(twin) is vars(twin.module) and twin.module.owner is twin
            assert_same(twin(x()), Net.forward(twin.module, x()))


# ---- graphs


def test_gradients_and_graphs_within() -> None:
    """Each inner wrapper runs a graph of its own; within an accelerated model all are parts of
    one."""
    for around in (False, True):
        ours, plain = pair("nested")
        if around:
            onward.accelerate(ours, strict=True)
        for step in range(2):
            for m in (ours, plain):
                m.zero_grad()
                m(x(step)).square().sum().backward()
            assert_same(ours(x(5)), plain(x(5)))
            for (n, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, **CLOSE, msg=lambda m, n=n: f"{n} {m}")
        held = accelerated(ours if around else ours.inner)
        assert held is not None and held.plan.launches


def test_a_graph_around_sees_what_changes_within() -> None:
    model: Any = onward.accelerate(Outer(onward.Module(Net())), strict=True)
    plain = Outer(Net())
    plain.load_state_dict(model.state_dict())
    changes: list[Callable[[Any], Any]] = [
        lambda m: setattr(m.inner, "norm", nn.Identity()),
        lambda m: setattr(m.inner, "forward", lambda x: x * 3),
        lambda m: setattr(m, "inner", nn.Identity()),
    ]
    for change in changes:
        for m in (model, plain):
            change(m)
        assert_same(model(x()), plain(x()))


def test_accelerate_of_a_wrapper_and_another_model_in_it() -> None:
    model = Net()
    first = onward.Module(model)
    assert onward.accelerate(first, strict=True) is first
    del first
    held = accelerated(model)
    assert held is not None and held.options.strict and held.model is model
    wrapper: Any = onward.Module(model, strict=True)
    other: Any = nn.Linear(W, W)
    wrapper.module = other
    assert wrapper.module is other and wrapper.weight is other.weight
    assert_same(wrapper(x()), nn.functional.linear(x(), other.weight, other.bias))
    held = accelerated(other)
    assert held is not None and held.options.strict and held.plan.launches


def test_a_trainer_of_a_wrapper(tmp_path: Path) -> None:
    for kind in ("itself", "within", "nested"):
        ours, plain = pair(kind)
        losses = []
        for m in (ours, plain):
            optimizer = torch.optim.SGD(m.parameters(), 0.1)
            trainer = onward.Trainer(m, optimizer, nn.functional.mse_loss)
            losses.append([float(trainer.train_step(x(s), x(9)).loss) for s in range(3)])
            trainer.export_onnx(tmp_path / "model.onnx")
            assert set(trainer.state_dict()["model"]) == set(plain.state_dict())
        assert losses[0] == losses[1]
