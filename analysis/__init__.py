"""Checks, verdicts, tables, plots and reports, all from evidence alone."""
