"""Hostile input for everything that reads bytes of strangers, made from a seed.

Honest inputs (recorded and generated) are damaged in ways that know the protocol, and given to
decoders and to live programs on loopback. What must hold after each of them stands in the targets.

    corpus,      ->  damage   ->  targets          ->  campaign         ->  __main__
    http_corpus      (one or      (make, feed,         (budget, deadline,   (arguments,
    (honest bytes)    more ways)   check)               memory, files)       table)

Targets: `pure` (the protocol), `saved` (payloads, cache files), `texts` (bodies of requests and
replies of models); of running programs `live` (workers, coordinators) and `web` (the HTTP server).
"""
