"""scripts/benchmark.py runs every topic and prints its tables. How fast is never asserted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"


def run(*arguments, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


def rows(text):
    """The cells of each line of the tables, heads and rules left out."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines if "ratio" not in line[-8]]


@pytest.mark.long
@pytest.mark.parametrize("topic, count, received", [("products", 14, "0.20"), ("attention", 4, "4.19")])
def test_a_topic_prints_its_table(topic, count, received, tmp_path):
    done = run(topic, "--quick", "--pairs", "2", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    table = rows(done.stdout)
    assert len(table) == count
    assert all(re.fullmatch(r"\*\*\d+\.\d\d\*\*", line[-8]) for line in table)
    assert table[0][-1] == received         # MB: the other half of [1024, 96]; of k and v, forward and backward


def test_a_topic_that_is_not_there_is_refused(tmp_path):
    done = run("product", cwd=tmp_path)
    assert done.returncode == 2 and "there is no topic 'product'; there are products" in done.stderr
