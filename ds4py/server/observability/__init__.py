"""What a running server tells about itself: health, figures, the latest log lines."""
