"""Conversion of checkpoints: between plans, and from and to Hugging Face's format."""
