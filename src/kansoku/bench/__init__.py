"""Benchmarks: runs, MLPerf logs, scores, scaling. Import the modules; effects live in ``edge``."""
