"""Spreading one model over processes: launching, sharding, reducers."""
