"""A gateway as a user might have written it: round robin, one retry. It knows nothing of scenarios or evidence."""

import asyncio

from protocol.errors import NetworkError, Outcome
from protocol.ports import backend
from protocol.serving.gateway import HealthView


class Gateway:
    """Sends each request to the next replica, and to the one after it when the connection fails."""

    def __init__(self, config):
        self._config = config
        self._replicas = {}  # address -> client
        self._down = set()
        self._turn = 0
        self._version = 0

    async def generate(self, request):
        for attempt in range(self._config.attempts):
            client = await self._next()
            try:
                return await client.generate(request, connect_timeout_s=2.0, read_timeout_s=5.0)
            except NetworkError as error:
                if attempt + 1 == self._config.attempts or not self.may_retry(request, error):
                    raise

    def may_retry(self, request, error):
        return True  # the planted defect: the engine may have done the work, and only its reply was lost

    async def _next(self):
        while not (up := [client for address, client in self._replicas.items() if address not in self._down]):
            await asyncio.sleep(0.05)
        self._turn += 1
        return up[self._turn % len(up)]

    # What the health prober and the recovery ask of a gateway.

    async def add_replica(self, address):
        self._replicas[address] = backend().engines.client(address)
        self._version += 1
        return True

    async def replace_replica(self, old, new):
        if old not in self._replicas:
            return False
        del self._replicas[old]
        return await self.add_replica(new)

    async def close_admission(self, address, why):
        self._down.add(address)
        return address in self._replicas

    async def set_routable(self, address, routable, why):
        (self._down.discard if routable else self._down.add)(address)
        return routable and address in self._replicas

    async def roster(self):
        return tuple(self._replicas)

    async def health_view(self, known_version, stall_window_s):
        roster = None if known_version == self._version else tuple(self._replicas)
        return HealthView(self._version, roster, (), ())


class CarefulGateway(Gateway):
    """The same without the defect: a call whose outcome is unknown is sent again only where that is harmless."""

    def may_retry(self, request, error):
        return error.outcome is Outcome.NOT_DONE or request.idempotent
