"""Other projects' checkpoints as ours."""
