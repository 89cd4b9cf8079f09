"""Charts: what is drawn, as values, and how, as SVG and as PNG."""
