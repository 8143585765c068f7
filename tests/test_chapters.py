"""Every chapter is a test: it runs from its text, is in normal form, and its cells do not depend on their order.

Run one with `pytest -k staircase`; a chapter takes its smoke scale here unless MEMORIZATION_SCALE says otherwise.
"""

import ast
import os
import symtable
from pathlib import Path

import jupytext
import pytest
import yaml
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[1]


def toc_files():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [toc["root"]] + [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [ROOT / f"{name}.md" for name in listed]


def code_cells(path):
    return [cell.source for cell in jupytext.read(path, fmt="md:myst").cells if cell.cell_type == "code"]


PAGES = toc_files()
CHAPTERS = [path for path in PAGES if code_cells(path)]
chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def execute(notebook):
    resources = {"metadata": {"path": str(ROOT / "book")}}
    NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=resources).execute()


@pytest.fixture(autouse=True)
def smoke(monkeypatch):
    monkeypatch.setenv("MEMORIZATION_SCALE", os.environ.get("MEMORIZATION_SCALE") or "smoke")


@chapter
def test_chapter_executes(path):
    execute(jupytext.read(path, fmt="md:myst"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_normal_form(path):
    if path not in CHAPTERS:
        pytest.skip("a page without code is plain Markdown")
    text = path.read_text(encoding="utf-8")
    assert text == jupytext.writes(jupytext.reads(text, fmt="md:myst"), fmt="md:myst")
    assert "format_version" in text and "jupytext_version:" not in text


def test_every_page_is_listed_and_no_output_is_committed():
    assert sorted((ROOT / "book").glob("*.md")) == sorted(PAGES)
    assert not list((ROOT / "book").rglob("*.ipynb"))


# --- order of the cells ---------------------------------------------------------------------------------------------


CHANGING = {"append", "extend", "update", "pop", "insert", "sort", "setdefault", "shuffle", "fill", "clear", "add"}


class Names:
    """The names that a cell binds at its top level, reads from outside, and changes in place."""

    def __init__(self, source):
        top = symtable.symtable(source, "cell", "exec")
        self.bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        self.read = set(self._outside(top)) - self.bound
        self.changed = set(self._changes(ast.parse(source))) & self.read

    @classmethod
    def _outside(cls, table):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from cls._outside(child)

    @staticmethod
    def _changes(tree):
        for node in ast.walk(tree):
            target = None
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
                target = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
                target = node.func.value
            while isinstance(target, (ast.Subscript, ast.Attribute)):
                target = target.value
            if isinstance(target, ast.Name):
                yield target.id


def dependencies(path):
    """For each cell, the earlier cells that it needs; fails where the order of copying could matter."""
    cells = [Names(source) for source in code_cells(path)]
    binders = {}
    for index, cell in enumerate(cells):
        for name in cell.bound:
            binders.setdefault(name, []).append(index)
    needs = []
    for index, cell in enumerate(cells):
        assert not cell.changed, f"cell {index} of {path.name} changes {cell.changed}, which another cell made"
        needed = set()
        for name in cell.read & binders.keys():
            assert len(binders[name]) == 1, f"{name}, read by cell {index} of {path.name}, has several definitions"
            (binder,) = binders[name]
            assert binder < index, f"cell {index} of {path.name} reads {name} before it is defined"
            needed.add(binder)
        needs.append(needed)
    return needs


def another_order(needs):
    """The order of cells in which each comes as early as what it needs allows, later ones first."""
    order, done = [], set()

    def place(index):
        if index not in done:
            done.add(index)
            for needed in sorted(needs[index]):
                place(needed)
            order.append(index)

    for index in reversed(range(len(needs))):
        place(index)
    return order


@chapter
def test_cells_can_be_copied_in_any_order(path):
    sources = code_cells(path)
    order = another_order(dependencies(path))
    assert sorted(order) == list(range(len(sources)))
    execute(new_notebook(cells=[new_code_cell(sources[index]) for index in order]))
