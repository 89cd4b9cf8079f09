"""Bursts on a cell of an OpenVINO node and a vLLM node: `make bench-mixed`."""
