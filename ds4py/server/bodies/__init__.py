"""Bodies of requests: JSON bytes to checked values, one module per dialect."""
