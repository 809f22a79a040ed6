"""`ladder bench inference`: prefill and decode of several plans and reducers, side by side."""
