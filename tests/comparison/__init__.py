"""What integrations can do, found by running them: the table of docs/integrations.md.

`features.py` lists the features, each a probe that asks a model and looks at what happens; `columns.py` makes the
classes that are compared.  A probe sees a class through its framework's adapter, ours and others' through the same one.
"""
