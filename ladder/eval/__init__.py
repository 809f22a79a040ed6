"""Evaluation: lm-evaluation-harness on our engine, and tasks that need no network."""
