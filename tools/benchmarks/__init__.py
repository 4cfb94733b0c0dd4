"""What ./tools/bench measures: ratios to named baselines, section by section."""
