"""Flags of the programs, and the configs they become."""
