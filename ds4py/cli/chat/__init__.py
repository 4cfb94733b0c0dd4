"""A conversation at the terminal, with a model here or on a server."""
