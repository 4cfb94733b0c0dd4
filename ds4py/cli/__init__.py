"""The commands that people type: flags in, text and exit statuses out.

Owns: click, the terminal. Refuses to know: how anything is done. Invariant: `--help` of every
command imports neither torch nor a model; what a command needs, it imports in its body.
"""
