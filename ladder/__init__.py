"""Transformers whose architecture makes tensor parallelism cheap.

Importing this package imports nothing else: no torch, nothing distributed.
"""

__version__ = "0.1.0"
