"""Whether a model's configurations have a cache on is known anew at each call, without a walk where
nothing in the model has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from onward.capture import CacheSetting


def off() -> Any:
    return SimpleNamespace(use_cache=False)


def on() -> Any:
    return SimpleNamespace(use_cache=True)


class Layer(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        if config is not None:
            self.config = config


def made() -> Any:
    model: Any = Layer(off())
    model.first, model.last = Layer(off()), nn.Sequential(Layer(), Layer(off()))
    model.nothing = None
    return model


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a field": (lambda m: setattr(m.last[1].config, "use_cache", True), True),
    "a field of the model's": (lambda m: setattr(m.config, "use_cache", True), True),
    "another field": (lambda m: setattr(m.last[1].config, "use_caches", True), False),
    "a number": (lambda m: setattr(m.last[1].config, "use_cache", 1), False),
    "a configuration": (lambda m: setattr(m.last[1], "config", on()), True),
    "the first one of a layer": (lambda m: setattr(m.last[0], "config", on()), True),
    "the model's": (lambda m: setattr(m, "config", on()), True),
    "none any more": (lambda m: delattr(m.first, "config"), False),
    "a layer": (lambda m: setattr(m, "first", Layer(on())), True),
    "a layer further in": (lambda m: setattr(m.last, "0", Layer(on())), True),
    "a layer more": (lambda m: m.add_module("more", Layer(on())), True),
    "a layer at the very end": (lambda m: m.last[1].add_module("more", Layer(on())), True),
    "a layer in a leaf": (lambda m: m.first.add_module("more", Layer(on())), True),
    "a layer in the place of None": (lambda m: setattr(m, "nothing", Layer(on())), True),
    "other names": (lambda m: setattr(m, "_modules", {"a": Layer(on())}), True),
    "a module's whole state": (
        lambda m: setattr(m.first, "__dict__", {**vars(Layer(on()))}), True,
    ),
    "a layer less": (lambda m: delattr(m, "last"), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name: str) -> None:
    setting, model = CacheSetting(), made()
    change, want = CHANGES[name]
    assert [setting.is_on(model) for _ in range(3)] == [False] * 3
    change(model)
    assert [setting.is_on(model) for _ in range(3)] == [want] * 3
    for config in (m.config for m in model.modules() if hasattr(m, "config")):
        config.use_cache = False
    assert not setting.is_on(model)
    assert not setting.is_on(made())


def test_nothing_is_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    plain = nn.Module.modules

    def counted(model: nn.Module) -> Iterator[nn.Module]:
        walks.append(1)
        return plain(model)

    monkeypatch.setattr(nn.Module, "modules", counted)
    setting, model = CacheSetting(), made()
    for _ in range(5):
        assert not setting.is_on(model)
    model.last[1].config.use_cache = True
    assert setting.is_on(model)
    assert len(walks) == 1
