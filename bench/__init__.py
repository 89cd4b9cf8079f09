"""Benchmarks, which `python -m bench` lists."""
