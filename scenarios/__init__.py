"""Scenario files and what runs them: command line, schema, runner, workloads, exploration."""
