"""The edge where clients of OpenAI and Anthropic come in: HTTP, JSON and their schemas."""
