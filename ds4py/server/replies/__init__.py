"""Shapes of replies: events to JSON and to the bytes of a stream, one module per dialect."""
