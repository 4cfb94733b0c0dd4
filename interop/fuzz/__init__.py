"""Hostile input for everything that reads bytes of strangers, made from a seed.

Honest inputs (recorded and generated) are damaged in ways that know the protocol, and given to
decoders and to live programs on loopback. What must hold after each of them stands in the targets.

    corpus  ->  damage   ->  pure, live       ->  campaign         ->  __main__
    (honest     (one or      (targets: make,      (budget, deadline,   (arguments,
     bytes)      more ways)   feed, check)         memory, files)       table)
"""
