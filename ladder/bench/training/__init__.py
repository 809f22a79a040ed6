"""`ladder bench train`: training steps of several plans under several layouts, in one run."""
