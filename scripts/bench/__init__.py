"""What scripts/benchmark.py is made of: `race` how it measures, `work` what is computed, `topics` what is compared."""
