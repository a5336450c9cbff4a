"""Stands in for triton (565 to 999 MB unpacked) where no kernel is ever launched.

Every name below ``triton`` imports, so that SGLang's kernels can be defined; launching one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class Inert:
    """Any triton name that is used while modules are imported: callable, has every attribute, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it gives back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Inert()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError("there is no triton in this environment: kernels cannot be launched")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class Kernel(Inert):
    """What ``@triton.jit`` makes of a function: it can be looked at, not launched."""

    def __init__(self, function: Any = None, **kwargs: Any) -> None:
        self.fn = self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"there is no triton in this environment: {self.__name__} cannot be called")


class NoDriver:
    """``triton.runtime.driver``: asking it for a device fails as it does on a machine without one."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("there is no triton driver in this environment")


class StandIn(types.ModuleType):
    """A module of triton: classes for capitalised names, decorators and values for the others."""

    def __init__(self, name: str, doc: str | None = None) -> None:
        super().__init__(name, doc)
        self.__path__: list[str] = []  # a package: all that lies below it imports too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = jit if name == "jit" else type(name, (Inert,), {}) if name[:1].isupper() else Inert()
        setattr(self, name, value)
        return value


def jit(function: Any = None, **kwargs: Any) -> Any:
    """``@jit`` and ``@jit(...)``."""
    return Kernel(function) if function is not None else Kernel


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``triton`` and everything below it here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        found: Any = module
        if module.__name__ in ("triton", "triton.runtime"):
            found.driver = NoDriver()
        if module.__name__ == "triton":
            found.__version__ = "0.0.0"
            found.cdiv = lambda a, b: -(-a // b)
            found.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def install() -> None:
    """Put the stand-in in place of triton, once in a process."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    # torch looks these up as attributes of triton without importing them.
    for name in ("triton.runtime", "triton.language", "triton.compiler", "triton.backends"):
        importlib.import_module(name)
