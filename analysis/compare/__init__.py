"""A simulated run beside real ones: phase by phase, metric by metric, and the order of protocol events."""
