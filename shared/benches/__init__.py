"""Benchmarks, run by hand: numbers of one run compared with each other, never with a clock on another day."""
