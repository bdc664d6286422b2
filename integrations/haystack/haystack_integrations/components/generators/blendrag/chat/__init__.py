"""The chat generator, and what it translates."""
