"""Byzantine workers: attacks, and aggregation rules that withstand them."""
