"""Benchmarks: they time and never assert, and write JSON that says on what and with what it was measured."""
