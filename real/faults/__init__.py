"""Faults in the real world: the table that every process looks at, and the driver's half that fills it."""
