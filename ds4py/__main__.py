"""`python -m ds4py` is the `ds4py` command."""

from ds4py.cli.main import main

main()
