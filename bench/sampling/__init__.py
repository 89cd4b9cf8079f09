"""What choosing the tokens of a batch costs, beside the same by the book."""
