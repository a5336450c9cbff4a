"""Which addresses other machines reach. Needs nothing but the standard library."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine alone. Of names only ``localhost`` is known to be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
