"""Benchmarks of mpexec against what Python and the machine give by themselves; `tools/bench` runs them."""
