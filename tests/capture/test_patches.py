"""What is patched for a while is put back as it was, and other threads see nothing of it."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from onward.model_state.patches import ABSENT, Patch, caller, look, patched


class Parent:
    def inherited(self) -> str:
        return "inherited"

    @classmethod
    def made(cls) -> str:
        return f"of {cls.__name__}"


class Owner(Parent):
    __slots__ = ("slot",)
    number = 1

    def __init__(self) -> None:
        self.slot = "slot"

    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return f"class method of {cls.__name__}"

    @property
    def read(self) -> str:
        return "property"


def in_another_thread(ask: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def module() -> types.ModuleType:
    made = types.ModuleType("made")
    exec("def function(): return 'function'\ndef told(x): return isinstance(x, int)", vars(made))
    return made


MODULE = module()
REGISTRY = {"kind": lambda: "kind"}


def no(*_: Any) -> str:
    return "replaced"


# each place that is patched, how it is asked, and its answer without a patch
CALLS: dict[str, tuple[Any, str, Callable[[], Any], Any]] = {
    "a method": (Owner, "method", lambda: Owner().method(), "method"),
    "a method, unbound": (Owner, "method", lambda: Owner.method(Owner()), "method"),
    "an inherited method": (Owner, "inherited", lambda: Owner().inherited(), "inherited"),
    "a static method": (Owner, "static", lambda: Owner.static(), "static"),
    "a static method of an object": (Owner, "static", lambda: Owner().static(), "static"),
    "a class method": (Owner, "of_class", lambda: Owner.of_class(), "class method of Owner"),
    "a class method of an object": (
        Owner, "of_class", lambda: Owner().of_class(), "class method of Owner",
    ),
    "a function of a module": (MODULE, "function", lambda: MODULE.function(), "function"),
    "a name in globals": (vars(MODULE), "function", lambda: MODULE.function(), "function"),
    "a builtin in globals": (vars(MODULE), "isinstance", lambda: MODULE.told(3), True),
    "an entry of a registry": (REGISTRY, "kind", lambda: REGISTRY["kind"](), "kind"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_function_is_replaced_for_the_thread_that_enters_alone(case: str) -> None:
    owner, name, ask, plain = CALLS[case]
    own = look(owner, name)
    assert ask() == plain
    with patched([(owner, name, no)]):
        assert ask() == "replaced"
        assert in_another_thread(ask) == plain
    assert ask() == plain
    assert look(owner, name) is own


@pytest.mark.parametrize("case", CALLS)
def test_patches_within_patches(case: str) -> None:
    owner, name, ask, plain = CALLS[case]
    own = look(owner, name)
    with patched([(owner, name, no)]):
        outer = look(owner, name)
        with patched([(owner, name, lambda *_: "inner")]):
            assert ask() == "inner"
            assert in_another_thread(ask) == plain
        assert look(owner, name) is outer
        assert ask() == "replaced"
    assert look(owner, name) is own


def test_an_inherited_class_method_is_given_the_class_that_was_asked() -> None:
    class Child(Owner):
        pass

    with patched([(Owner, "made", classmethod(no))]):
        assert (Owner.made(), Child.made()) == ("replaced", "replaced")
        assert in_another_thread(lambda: (Owner.made(), Child.made())) == ("of Owner", "of Child")
    assert Child.made() == "of Child"
    assert look(Owner, "made") is ABSENT


def test_a_place_that_is_patched_twice_is_put_back_once_and_for_all() -> None:
    own = look(Owner, "method")
    with patched([(Owner, "method", no), (Owner, "method", lambda *_: "again")]):
        assert Owner().method() == "again"
        assert in_another_thread(lambda: Owner().method()) == "method"
    assert look(Owner, "method") is own


def test_two_threads_have_replacements_of_their_own() -> None:
    def inner() -> str:
        with patched([(Owner, "method", lambda *_: "theirs")]):
            return Owner().method()

    with patched([(Owner, "method", lambda *_: "ours")]):
        assert in_another_thread(inner) == "theirs"
        assert Owner().method() == "ours"
    assert Owner().method() == "method"


@pytest.mark.parametrize("name", ["number", "slot", "read", "static", "of_class", "method"])
@pytest.mark.parametrize("value", [property(no), 5, staticmethod(no), classmethod(no), Parent])
def test_any_attribute_is_put_back_as_the_object_that_it_was(name: str, value: Any) -> None:
    own = vars(Owner)[name]
    with patched([(Owner, name, value)]):
        assert vars(Owner)[name] is not own
        if not isinstance(value, (staticmethod, classmethod)):  # those tell threads apart
            assert vars(Owner)[name] is value
        else:
            assert type(vars(Owner)[name]) is type(value)
            assert getattr(Owner, name)() == "replaced"
    assert vars(Owner)[name] is own
    assert Owner().slot == "slot"


@pytest.mark.parametrize(
    "owner",
    [Owner, MODULE, vars(MODULE), REGISTRY],
    ids=["class", "module", "names", "mapping"],
)
def test_what_was_absent_is_absent_again(owner: Any) -> None:
    with patched([(owner, "fresh", no), (owner, "number_of", 3)]):
        assert look(owner, "number_of") == 3
        assert look(owner, "fresh")() == "replaced"
        with pytest.raises(AttributeError, match="fresh"):  # as if it were not there
            in_another_thread_raising(look(owner, "fresh"))
    assert look(owner, "fresh") is ABSENT
    assert look(owner, "number_of") is ABSENT


def in_another_thread_raising(ask: Callable[[], Any]) -> None:
    def told() -> BaseException | None:
        try:
            ask()
        except BaseException as error:
            return error
        return None

    error = in_another_thread(told)
    if error is not None:
        raise error


def test_what_was_deleted_or_set_meanwhile_is_put_back_all_the_same() -> None:
    own = look(Owner, "method")
    with patched([(Owner, "method", no), (Owner, "fresh", no)]):
        del Owner.method, Owner.fresh  # type: ignore[attr-defined]
    assert look(Owner, "method") is own
    assert look(Owner, "fresh") is ABSENT


class Stop(BaseException):
    """A BaseException that is no Exception, like SystemExit."""


class Counted(type):
    """A metaclass that counts attributes as they are set, and raises at one of them: before or
    after."""

    raises: tuple[int, bool, type[BaseException]] | None = None
    count = 0

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("at_"):
            at = Counted.count
            Counted.count += 1
            if Counted.raises is not None and Counted.raises[0] == at:
                if Counted.raises[1]:
                    super().__setattr__(name, value)
                raise Counted.raises[2]
        super().__setattr__(name, value)


class Places(metaclass=Counted):
    at_0, at_1, at_2, at_3 = range(4)


PLACES: list[Patch] = [
    *((Places, f"at_{i}", f"patched {i}") for i in range(4)),
    *((Places, f"at_{i}", f"absent {i}") for i in range(4, 6)),
    *((Places, f"at_{i}", f"twice {i}") for i in range(2)),
]
# attributes set again, in this order; those that were absent are deleted
PUT_BACK = [name for _, name, _ in reversed(PLACES) if hasattr(Places, name)]
RAISED = [(at, error) for at in range(len(PLACES)) for error in (KeyboardInterrupt, ValueError)]
RAISED += [
    (len(PLACES) + at, error) for at in range(len(PUT_BACK)) for error in (KeyboardInterrupt, Stop)
]


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(("at", "error"), RAISED)
def test_all_is_put_back_after_an_interrupt_at_any_place(
    at: int, is_set: bool, error: type[BaseException]
) -> None:
    """An interrupt at any place, in setting or in putting back, leaves every attribute as it
    was."""
    before = dict(vars(Places))
    Counted.count, Counted.raises = 0, (at, is_set, error)
    try:
        with pytest.raises(error), patched(PLACES):
            assert at >= len(PLACES)
    finally:
        Counted.raises = None
    assert Counted.count > at  # it was there that it raised
    assert dict(vars(Places)) == before


@pytest.mark.parametrize("at", range(len(PUT_BACK)))
def test_where_one_place_cannot_be_put_back_the_others_are(at: int) -> None:
    before = dict(vars(Places))
    Counted.count, Counted.raises = 0, (len(PLACES) + at, False, ValueError)
    try:
        with pytest.raises(ValueError), patched(PLACES):
            pass
        broken = {n for n, x in vars(Places).items() if x is not before.get(n, ABSENT)}
    finally:
        Counted.raises = None
        for name, value in before.items():
            if name.startswith("at_"):
                setattr(Places, name, value)
    assert broken == {PUT_BACK[at]} - set(PUT_BACK[at + 1 :])  # one that comes again is whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, ValueError, GeneratorExit])
def test_all_is_put_back_after_an_error_within(error: type[BaseException]) -> None:
    before = dict(vars(Places))
    with pytest.raises(error), patched(PLACES):
        raise error
    assert dict(vars(Places)) == before


def test_places_that_cannot_be_patched_leave_those_before_as_they_were() -> None:
    own = look(Owner, "method")
    with pytest.raises(TypeError), patched([(Owner, "method", no), (int, "real", no)]):
        pass
    assert look(Owner, "method") is own
    assert Owner().method() == "method"


def test_a_replacement_knows_who_asks() -> None:
    """`caller()` finds the module that asks, through other patches of the same place and through
    inheritance."""
    scope: dict[str, Any] = {"__name__": "model", "Owner": Owner}
    exec("def ask(x): return x.method()", scope)
    replacing: dict[str, Any] = {"__name__": "replacing", "caller": caller}
    exec("def tell(x): return caller().f_globals['__name__']", replacing)
    with patched([(Owner, "method", replacing["tell"])]):
        assert scope["ask"](Owner()) == "model"
        assert Owner().method() == __name__
        assert inspect.signature(Owner.method) == inspect.signature(replacing["tell"])
