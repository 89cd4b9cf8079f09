"""What OpenAI's protocol costs beside gRPC."""
