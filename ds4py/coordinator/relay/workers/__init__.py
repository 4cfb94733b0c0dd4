"""The workers of a coordinator: how they are found, greeted, listed and lost."""
