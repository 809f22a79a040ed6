"""Fused computation and communication: products, lookups and landings that also exchange rows."""
