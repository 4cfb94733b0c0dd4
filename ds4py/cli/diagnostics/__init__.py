"""What a model file holds, and what a model makes of a text."""
