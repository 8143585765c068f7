"""English prose that every machine with this package already holds: the documentation of Python, numpy and scipy.

Source files are parsed, never imported: `pydoc_data`'s topics, docstrings, and the comments that fill a line. What
is kept of them is their sentences: section headings, parameter lines, examples, references, tables and markup go,
and a paragraph that occurs many times is kept once.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings"})
SKIPPED_SECTIONS = frozenset({"see also", "references"})
SHORTEST_PARAGRAPH = 40  # characters; anything shorter is a label rather than a sentence
LEAST_LETTERS = 0.75  # of a paragraph's characters, spaces counted as letters: below this it is code or a table

_RULE = re.compile(r"^\s*[-=~^*`]{3,}\s*$")
_PARAMETER = re.compile(r"^\s*[\w*,.\s{}()\[\]'\"|\\/]{1,60} : \S")
_PROSE_DIRECTIVE = re.compile(
    r"^\s*\.\. (?:note|warning|caution|important|tip|hint|seealso|admonition|deprecated|version\w+)::[\s\d.]*"
)
_ROLE = re.compile(r":[a-z:]{1,20}:`~?([^`<]+?)(?:\s*<[^`>]*>)?`")
_CITATION = re.compile(r"\s*\[\w{1,12}\]_")
_TEXTLESS = frozenset({ast.Name, ast.Load, ast.Store})
_NOT_A_LETTER = re.compile(r"[^A-Za-z ]+")
_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)]|\(\w\))\s+")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_sections(lines: list[str]) -> list[str]:
    """Drop ruled headings, and whole sections that hold no prose of their own."""
    kept: list[str] = []
    skipping = False
    for number, line in enumerate(lines):
        if number + 1 < len(lines) and line.strip() and _RULE.match(lines[number + 1]):
            skipping = line.strip().lower() in SKIPPED_SECTIONS
            kept.append("")
        elif not skipping and not _RULE.match(line):
            kept.append(line)
    return kept


def _without_blocks(lines: list[str]) -> list[str]:
    """Drop doctests with their output, parameter lines, literal blocks, and directives that hold no prose."""
    kept: list[str] = []
    block_indent: int | None = None  # drop lines indented deeper than this
    in_doctest = False
    for line in lines:
        if not line.strip():
            in_doctest = False
            kept.append("")
            continue
        if block_indent is not None and _indent(line) > block_indent:
            continue
        block_indent = None
        if in_doctest or line.lstrip().startswith(">>>"):
            in_doctest = True
        elif note := _PROSE_DIRECTIVE.match(line):
            kept.extend(["", line[note.end() :]])
        elif line.lstrip().startswith(".. "):
            block_indent = _indent(line)
        elif _PARAMETER.match(line):
            kept.append("")
        else:
            if line.rstrip().endswith("::"):
                block_indent = _indent(line)
                line = line.rstrip()[:-1]
            kept.append(line)
    return kept


def paragraphs(docstring: str) -> Iterator[str]:
    """The paragraphs of prose in a docstring, each on one line, without markup."""
    lines = _without_blocks(_without_sections(docstring.expandtabs().splitlines()))
    gathered: list[str] = []
    for line in [*lines, ""]:
        bullet = _BULLET.match(line)
        if gathered and (not line.strip() or bullet):
            text = _plain(" ".join(gathered))
            if _is_prose(text):
                yield text
            gathered = []
        if line.strip():
            gathered.append(line[bullet.end() :].strip() if bullet else line.strip())


def _plain(text: str) -> str:
    text = _CITATION.sub("", _ROLE.sub(r"\1", text))
    return re.sub(r"\s+", " ", re.sub(r"[`*]{1,2}(\S[^`*]*?)[`*]{1,2}", r"\1", text)).strip()


def _is_prose(text: str) -> bool:
    letters = len(_NOT_A_LETTER.sub("", text))
    return len(text) >= SHORTEST_PARAGRAPH and letters >= LEAST_LETTERS * len(text) and text.count(" ") >= 5


def _in_order(tree: ast.AST) -> list[ast.AST]:
    """The nodes of a tree as one reads them, leaves that hold no text left out (`ast.walk` takes twice as long)."""
    nodes, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        for field in reversed(node._fields):
            value = getattr(node, field, None)
            if type(value) is list:
                waiting.extend(part for part in reversed(value) if isinstance(part, ast.AST))
            elif isinstance(value, ast.AST) and type(value) not in _TEXTLESS:
                waiting.append(value)
    return nodes


def _docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and long strings handed to `add_newdoc` and its like."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if found := ast.get_docstring(node):
                yield found
        elif isinstance(node, ast.Call) and "doc" in (getattr(node.func, "id", "") or getattr(node.func, "attr", "")):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\n" in part.value:
                    yield part.value


def _comments(nodes: list[ast.AST], source: str) -> Iterator[str]:
    """Runs of lines that hold a comment alone, outside of strings."""
    quoted: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno != node.lineno:
            quoted.update(range(node.lineno, node.end_lineno + 1))
    run: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        text = line.strip().lstrip("#").strip() if line.lstrip().startswith("#") and number not in quoted else ""
        if text:
            run.append(text)
        elif run:
            yield "\n".join(run)
            run = []


def _texts(name: str, path: Path) -> list[list[str]]:
    """The raw texts of a file, one list for each document it makes; none if it is not a readable Python file."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in others' docstrings
            nodes = _in_order(ast.parse(source))
    except (SyntaxError, ValueError, OSError):
        return []
    if name == "python/pydoc_data/topics.py":
        return [[text] for text in _topics(nodes)]
    return [[*_docstrings(nodes), *_comments(nodes, source)]]


def source_files() -> list[tuple[str, Path]]:
    """The files read, as (name, path), sorted by name: the same order on every machine."""
    roots = [("python", Path(sysconfig.get_paths()["stdlib"]))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            roots.append((package, Path(spec.origin).parent))
    found = []
    for name, root in roots:
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if not SKIPPED_FOLDERS.intersection(inside.parts):
                found.append((f"{name}/{inside.as_posix()}", path))
    return sorted(found)


def _topics(nodes: list[ast.AST]) -> Iterator[str]:
    """The texts of `pydoc_data.topics`: one dictionary of strings."""
    for node in nodes:
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def documents() -> tuple[str, ...]:
    """One document per source file (per topic of `pydoc_data`), its paragraphs on lines of their own."""
    seen: set[str] = set()
    made = []
    for name, path in source_files():
        for texts in _texts(name, path):
            fresh = []
            for paragraph in (paragraph for text in texts for paragraph in paragraphs(text)):
                if paragraph not in seen:
                    seen.add(paragraph)
                    fresh.append(paragraph)
            if fresh:
                made.append("\n".join(fresh) + "\n")
    return tuple(made)
