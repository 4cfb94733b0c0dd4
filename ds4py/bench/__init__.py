"""How fast it is: context frontiers of a route, and ratios against named baselines."""
