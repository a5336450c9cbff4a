"""The simulated world: event loop, actors, network, engines, cluster, storage and faults on SimPy."""
