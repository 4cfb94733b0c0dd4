"""The Python interface: a model in a few lines, whole in this process or over a route of machines.

Owns: what `ds4py.LLM` is. Refuses to know: flags, terminals, HTTP. Invariant: importing any of its
modules loads no torch; that comes with the first model. Users import the names from `ds4py`.
"""
