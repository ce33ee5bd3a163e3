"""Runs the notebooks, and writes what they show into them: ``python -m tests.pages.notebooks``.

All of them run in one kernel, one after the other, for a kernel's start takes longer than a notebook.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def executed(folder: Path) -> dict[Path, list[Any]]:
    """The cells of each notebook with the outputs of a run in ``folder``."""
    read = {path: nbformat.read(path, as_version=4).cells for path in NOTEBOOKS}
    cells = []
    for each in read.values():
        cells += [nbformat.v4.new_code_cell("%reset -f"), *(c for c in each if c.cell_type == "code")]
    whole = nbformat.v4.new_notebook(cells=cells)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        NotebookClient(
            whole, timeout=400, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return read


def shown(cell: Any) -> str:
    """The text of a cell's outputs; in how many pieces a kernel sends it is chance."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "".join(texts).strip()


def refresh() -> None:
    """Writes what a run shows."""
    with tempfile.TemporaryDirectory() as temporary:
        for path, cells in executed(Path(temporary)).items():
            notebook = nbformat.read(path, as_version=4)
            for k, (cell, run) in enumerate(zip(notebook.cells, cells, strict=True)):
                cell.metadata, cell["id"] = {}, f"{path.stem}-{k}"
                if cell.cell_type == "code":
                    text = shown(run)
                    cell.execution_count = None
                    cell.outputs = [nbformat.v4.new_output("stream", text=text + "\n")] if text else []
            nbformat.write(notebook, path)


if __name__ == "__main__":
    refresh()
