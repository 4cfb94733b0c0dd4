"""The coordinator's side of DS4D: its workers, the route, connections to hops."""
