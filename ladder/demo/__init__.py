"""`ladder demo`: one tiny model under five residual plans, trained, compared and run."""
