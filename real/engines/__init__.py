"""Serving engines of the real world: each a process of its own, owned by a Ray actor, seen through a front."""
