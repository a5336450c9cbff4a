"""Serving: gateway, health, recovery, admin calls."""
