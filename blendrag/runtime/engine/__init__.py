"""Engines: starting them, the thread or process they run in, and their end."""
