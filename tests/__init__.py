"""The tests, in the folders of `ladder`; what several share is in modules that are no tests."""

from pathlib import Path

ROOT = Path(__file__).parent.parent  # of the repository
