"""`make gpu`: runs everything that needs a GPU, in twenty minutes, with results in one folder.

`__main__` runs the parts that `parts` defines, each in a separate process. `row` and `trace` are
programs that parts run. `report` converts the results to Markdown and pictures.
"""
