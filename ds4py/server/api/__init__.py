"""The APIs of OpenAI and Anthropic: bodies to checked requests, events to replies."""
