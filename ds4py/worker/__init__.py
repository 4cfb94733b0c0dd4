"""The worker's side of DS4D: its layers for whoever connects, and the next hop."""
