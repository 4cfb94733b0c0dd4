"""What is remembered of earlier requests, in memory and on disk."""
