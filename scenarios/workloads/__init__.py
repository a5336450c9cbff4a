"""Workloads: streams of arrivals, read from public traces or drawn."""
