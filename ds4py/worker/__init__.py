"""The worker's side of DS4D: its layers for anyone who connects, and the next hop."""
