"""`ladder bench ops`: products and lookups that also exchange rows, against their parts."""
