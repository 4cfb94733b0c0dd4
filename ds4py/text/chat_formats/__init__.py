"""Messages to the prompts of a model."""
