"""The protocol layer: ordinary asyncio classes that know no backend, and the ports a backend must offer."""
