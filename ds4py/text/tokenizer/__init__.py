"""Text to token ids and back, as a GGUF file describes it."""
