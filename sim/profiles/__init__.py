"""Shipped engine profiles, one YAML file each, and the loader that finds them by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sim.engine_cost import EngineProfile, ProfileError, is_profile_name, load_profile_file

__all__ = ["EngineProfile", "ProfileError", "load_profile", "profile_names"]

_HERE = Path(__file__).parent


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _HERE.glob("*.yaml")))


def load_profile(name_or_path: str) -> EngineProfile:
    """A shipped profile by name, or any other by the path of its YAML file.

    Raises:
        ProfileError: nothing there, or a bad file; the text names what is known.
    """
    if is_profile_name(name_or_path) and not name_or_path.endswith((".yaml", ".yml")):
        if name_or_path not in profile_names():
            raise ProfileError(f"no engine profile {name_or_path!r}; shipped: {', '.join(profile_names())}")
        return _shipped(name_or_path)
    return load_profile_file(Path(name_or_path))


@cache  # profiles are immutable and part of the installation: the cache holds no state of a run
def _shipped(name: str) -> EngineProfile:
    return load_profile_file(_HERE / f"{name}.yaml")
