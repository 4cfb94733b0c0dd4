"""Many machines as one session: pure decisions, and the threads that carry them out."""
