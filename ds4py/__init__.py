"""ds4py: one big model across the machines people actually have."""

from typing import Final

__version__: Final = "0.1.1"
