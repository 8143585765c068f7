"""Figures appear in a notebook: every one of them, not only the first."""

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook


def test_every_figure_of_a_notebook_is_shown():
    draw = "with plotting.figure() as (fig, axes):\n    axes.plot([1, 2])"
    sources = ["from memorization import plotting", draw, draw, draw]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="python3").execute()
    shown = [[output.output_type for output in cell.outputs] for cell in notebook.cells]
    assert shown == [[], ["display_data"], ["display_data"], ["display_data"]]
