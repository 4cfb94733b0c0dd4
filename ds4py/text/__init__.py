"""Strings to token ids and back: tokenizers, chat templates, incremental text.

Owns: everything between a user's text and the model's token ids. Refuses to know: models, sessions,
HTTP. Invariant: nothing here has mutable state that two threads could disturb, except `TextStream`,
which belongs to one reply.
"""
