"""Analysis of runs: tables, statistics, charts, and the report page."""
