"""The scheduler half: what a request will reuse, and what should be stored."""
