"""`make bench-vllm-switch`: what loading, putting to sleep and waking a model costs."""
