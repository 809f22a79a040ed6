"""Other projects' checkpoints as ours, and back."""
