"""An emulated engine: the simulator's cost model run in real time behind SGLang's HTTP API. No GPU, no model."""
