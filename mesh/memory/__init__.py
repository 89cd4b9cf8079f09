"""The memory path: what an instance needs, and the books of what a node has given away."""
