"""Simulated engines: real processes, real KV pools, no model. For the demo, tests and benchmarks."""
