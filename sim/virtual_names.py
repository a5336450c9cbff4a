"""Names that a component's module has bound for itself: ``from time import monotonic``, ``import datetime``, defaults.

Patching ``time.monotonic`` does not reach a module that imported the function by name, and ``datetime.datetime`` cannot
be patched at all. So such references are found in the component's module and replaced there for the length of a run.
"""

from __future__ import annotations

import datetime as _datetime
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from sim.loop import ActorLoop, current_loop

# Packages of ours that bind no such name for use in a run (tests/sim/test_virtual.py): a walk through them would find
# nothing, and costs every seed of a sweep a millisecond.
_OURS = frozenset({"protocol", "sim", "scenarios"})
_LEFT_ALONE = _OURS | {"builtins", "__builtin__"} | sys.stdlib_module_names


class Renamer:
    """Replaces references to real functions by virtual ones, module by module, and puts them back.

    Args:
        replaced: id(real) -> (real, virtual).
    """

    def __init__(self, replaced: dict[int, tuple[Any, Any]]) -> None:
        self._replaced = replaced
        self._seen: set[int] = set()
        self._undo: list[Callable[[], object]] = []

    def adopt(self, module: types.ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        if package in _LEFT_ALONE:
            return
        todo = [module]
        while todo:
            module = todo.pop()
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            for name, value in list(vars(module).items()):
                found = self._virtual(value)
                if found is not None:
                    self._set(vars(module), name, value, found)
                    continue
                owner = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                if not isinstance(owner, str) or owner.partition(".")[0] != package:
                    continue
                if owner != module.__name__:
                    # Something of the same package that this module uses: its names count as the component's too.
                    used = sys.modules.get(owner)
                    if used is not None:
                        todo.append(used)
                elif isinstance(value, type):
                    self._adopt_class(value)
                elif isinstance(value, types.FunctionType):
                    self._adopt_function(value)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._seen.clear()

    def _virtual(self, value: Any) -> Any:
        pair = self._replaced.get(id(value))
        return None if pair is None else pair[1]

    def _set(self, names: dict[str, Any], name: str, real: Any, virtual: Any) -> None:
        names[name] = virtual

        def undo() -> None:
            if names.get(name) is virtual:  # else the component has rebound it since: its own affair
                names[name] = real

        self._undo.append(undo)

    def _adopt_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        for name, value in list(vars(cls).items()):
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            found = self._virtual(inner)
            if found is not None:
                # A built-in is no descriptor and a function is one: keep `self.clock()` from passing self.
                setattr(cls, name, staticmethod(found))
                self._undo.append(functools.partial(setattr, cls, name, value))
            elif isinstance(inner, types.FunctionType):
                self._adopt_function(inner)
            elif isinstance(inner, type) and inner.__module__ == cls.__module__:
                self._adopt_class(inner)

    def _adopt_function(self, function: types.FunctionType) -> None:
        for one in _unwrapped(function):
            if id(one) in self._seen:
                return
            self._seen.add(id(one))
            defaults, keyword_defaults = one.__defaults__, one.__kwdefaults__
            if defaults and any(id(value) in self._replaced for value in defaults):
                one.__defaults__ = tuple(self._virtual(value) or value for value in defaults)
                self._undo.append(functools.partial(setattr, one, "__defaults__", defaults))
            for name, value in list((keyword_defaults or {}).items()):
                found = self._virtual(value)
                if found is not None and keyword_defaults is not None:
                    self._set(keyword_defaults, name, value, found)
            # A dataclass keeps its default factories in the closure of the __init__ that it generates.
            for cell in one.__closure__ or ():
                try:
                    value = cell.cell_contents
                except ValueError:  # not filled yet
                    continue
                found = self._virtual(value)
                if found is not None:
                    cell.cell_contents = found
                    self._undo.append(functools.partial(setattr, cell, "cell_contents", value))


def _unwrapped(function: Any) -> Iterator[types.FunctionType]:
    while isinstance(function, types.FunctionType):
        yield function
        function = getattr(function, "__wrapped__", None)


def virtual_datetime_module(wall_ns: Callable[[ActorLoop], int]) -> list[tuple[Any, Any]]:
    """Stand-ins, as (real, virtual): the classes ``datetime`` and ``date``, and the module that holds them.

    Their constructors and methods give real ``datetime`` objects, so that what a component makes and sends is picklable
    and equal to what it makes elsewhere; only "now" differs.
    """
    real_datetime, real_date, utc = _datetime.datetime, _datetime.date, _datetime.UTC
    epoch = real_datetime(1970, 1, 1, tzinfo=utc)

    def utc_now(loop: ActorLoop) -> Any:
        return epoch + _datetime.timedelta(microseconds=wall_ns(loop) // 1000)

    class _StandIn(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, cls.__mro__[1])

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, cls.__mro__[1])

    class datetime(_datetime.datetime, metaclass=_StandIn):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real_datetime(*args, **kwargs)

        @classmethod
        def now(cls, tz: _datetime.tzinfo | None = None) -> Any:
            loop = current_loop()
            if loop is None:
                return real_datetime.now(tz)
            now = utc_now(loop)
            return now.replace(tzinfo=None) if tz is None else now.astimezone(tz)

        @classmethod
        def utcnow(cls) -> Any:
            loop = current_loop()
            return (real_datetime.now(utc) if loop is None else utc_now(loop)).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        @classmethod
        def fromtimestamp(cls, timestamp: float, tz: _datetime.tzinfo | None = None) -> Any:
            if tz is None and current_loop() is not None:  # an actor's local zone is UTC
                return real_datetime.fromtimestamp(timestamp, utc).replace(tzinfo=None)
            return real_datetime.fromtimestamp(timestamp, tz)

    class date(_datetime.date, metaclass=_StandIn):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real_date(*args, **kwargs)

        @classmethod
        def today(cls) -> Any:
            loop = current_loop()
            return real_date.today() if loop is None else utc_now(loop).date()

        @classmethod
        def fromtimestamp(cls, timestamp: float, /) -> Any:
            if current_loop() is not None:
                return real_datetime.fromtimestamp(timestamp, utc).date()
            return real_date.fromtimestamp(timestamp)

    module = types.ModuleType("datetime", _datetime.__doc__)
    vars(module).update({name: value for name, value in vars(_datetime).items() if not name.startswith("__")})
    vars(module).update(datetime=datetime, date=date)
    for stand_in in (datetime, date):
        stand_in.__module__, stand_in.__qualname__ = "datetime", stand_in.__name__
    return [(real_datetime, datetime), (real_date, date), (_datetime, module)]
