"""Sessions over a route: what is reused, cut into chunks, repeated after a loss."""
