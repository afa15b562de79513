"""Suites of evaluations, run cell by cell into a folder."""
