"""A package, so that pytest closes its engine when it leaves it: a process runs one engine at a time."""
