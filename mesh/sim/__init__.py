"""The virtual shell: heap clock, cost-model engine, links with a delay, a cell made of them."""
