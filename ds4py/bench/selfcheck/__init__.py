"""`ds4py-bench --self`: ratios against named baselines, section by section."""
