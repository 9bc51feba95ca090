"""Tests, by area as the package. `from tests.x import …` works from anywhere under here (pytest's `pythonpath` is the root)."""
