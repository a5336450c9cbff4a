"""Known-wrong variants: each must be caught by the check that it declares, and its twin must pass the same seeds."""
