"""What replicas are called."""

from __future__ import annotations

import pytest

from protocol.messages import replica_name, replica_of, service_of


@pytest.mark.parametrize(("service", "rank"), [("genrm", 0), ("genrm-b", 12), ("genrm-1", 3), ("a", 10**6)])
def test_the_name_of_a_replica_tells_its_service_and_rank(service: str, rank: int) -> None:
    name = replica_name(service, rank)
    assert replica_of(name) == (service, rank) and service_of(name) == service


@pytest.mark.parametrize(
    "name", ["", "driver", "-1", "genrm-", "genrm-x", "genrm-1-x", "genrm-\u0663", "genrm-\u00b2", "e0"]
)
def test_what_is_called_otherwise_is_no_replica(name: str) -> None:
    assert replica_of(name) is None and service_of(name) == ""
