"""Runs as tables, statistics, charts, the report page."""
