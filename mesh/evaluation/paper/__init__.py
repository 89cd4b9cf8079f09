"""The evaluation of LLM-Mesh: its cells, their runs, and these in tables, charts and a page."""
