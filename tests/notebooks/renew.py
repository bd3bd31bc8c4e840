"""Execute notebooks in a fresh kernel. ``python -m tests.notebooks.renew [NAME ...]`` renews what they show."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}  # the interpreter that runs this


def executed(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs of a run from top to bottom, in ``notebooks/``.

    Raises nbclient.exceptions.CellExecutionError, which shows the cell and the traceback.
    """
    fresh = nbformat.from_dict(notebook)
    where = {"metadata": {"path": str(NOTEBOOKS)}}
    client = NotebookClient(fresh, kernel_name=KERNEL["name"], resources=where, record_timing=False, timeout=300)
    client.execute()
    fresh.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    return fresh


def main(names: list[str]) -> None:
    """Renew the named notebooks, or all."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            print(f"running {path.name}", flush=True)
            nbformat.write(executed(nbformat.read(path, as_version=4)), path)


if __name__ == "__main__":
    main([name.removesuffix(".ipynb") for name in sys.argv[1:]])
