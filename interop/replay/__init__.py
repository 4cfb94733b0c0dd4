"""Recorded conversations of ds4 programs as peers of live ds4py programs.

In each recording (`tests/golden/wire`) one party is replaced by a live one of ds4py; all others say
what the C programs said, and what the live one says is compared field by field.

    recording  ->  script      ->  performance   ->  Report
    (bytes)        (pure steps)    (sockets)         (table of __main__)
                   allowed         live, compare
"""
