"""`ladder predict validate`: predictions against recorded times."""
