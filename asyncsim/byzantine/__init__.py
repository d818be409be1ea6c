"""Byzantine workers: what they send, and the rules that withstand it."""
