"""Runs of others, turned into our evidence, so that the same checks judge them (issue 4, scaling_acceptance.md 8)."""
