"""Where the time of chunks went, and traces of it as files."""
