"""`make gpu`: all that a machine with a GPU can tell, in twenty minutes, in one folder.

`__main__` runs the parts of `parts`, each in a process of its own; `row` and `trace` are such
processes, and `report` makes Markdown and pictures of what they wrote.
"""
