"""Text to tokens and back, with the model's own tokenizer and chat template."""
