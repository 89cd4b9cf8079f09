"""`make bench-vllm-step`: what stepping vLLM from another process adds to vLLM's own loop."""
