"""The scheduler side: what a request will reuse, and what should be stored."""
