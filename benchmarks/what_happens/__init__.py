"""The same scenes, played on several packages: ``python -m benchmarks.what_happens``."""
