"""The edge where clients of OpenAI's protocol come in: HTTP, JSON and its schemas."""
