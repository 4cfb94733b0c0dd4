"""From logits to a reply: sampling and the token loop, over any session.

Owns: which token comes next, under which grammar, and when to stop. Refuses to know: text, models,
sockets, HTTP. Invariant: the same logits, parameters and seed give the same tokens, on every
machine.
"""
