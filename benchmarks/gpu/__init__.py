"""`make gpu`: runs everything that needs a GPU, in twenty minutes, with results in one folder.

`__main__` runs the parts of `parts`, each in a separate process. `row` and `trace` are such
processes, and `report` turns their results into Markdown and pictures.
"""
