"""Pretraining: config, optimiser, loop, checkpoints, metrics."""
