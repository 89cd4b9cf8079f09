"""What resizing a KV cache costs: the elastic way against the copying one."""
