"""`ladder predict MODEL`: what fits a machine, how fast each plan runs there, and what to run."""
