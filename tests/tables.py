"""Tables of README.md that tests generate: what stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def table(head, rows):
    """Markdown of a table; head and rows are lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def in_readme(name):
    """The table called `name` as README.md has it."""
    return _place(name).search(README.read_text()).group(2)


def rows_in_readme(name):
    """Its rows below the head, as lists of cells."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in in_readme(name).splitlines()[2:]]


def write(name, text):
    """Put a table where README.md has the old one."""
    README.write_text(_place(name).sub(lambda found: found.group(1) + text + found.group(3), README.read_text()))


def _place(name):
    return re.compile(rf"(<!-- {name}: [^\n]*-->\n)(.*?)(\n<!-- end of {name} -->)", re.DOTALL)
