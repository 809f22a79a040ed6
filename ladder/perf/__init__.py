"""Predicted times: what a plan, a machine or a paper's hardware would take, without a GPU."""
