"""`ladder predict decode` and `ladder predict validate`: the times of decode steps."""
