"""Tool calls as models write them, read while they arrive."""
