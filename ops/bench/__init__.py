"""Benchmarks: they time and never assert, and write JSON with hardware, versions and commit."""
