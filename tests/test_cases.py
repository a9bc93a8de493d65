"""Each known failure of another library that this version must not have is named by the docstring of a test."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = [
    "C01", "C04", "C05", "C06", "C07", "C08", "C09", "C10", "C11", "C12",                           # gradients, sums
    "C13", "C14", "C15", "C16", "C17", "C18",                                                       # losses
    "C19", "C20", "C21", "C22", "C23",                                                              # masks
    "C24", "C25", "C26", "C27", "C28", "C29",                                                       # lengths, order
    "C30", "C31", "C32", "C33", "C34", "C35",                                                       # heads, numerics
    "C36", "C37", "C38", "C39", "C40", "C41", "C42", "C43",                                         # random, norms, states
    "C46", "C47", "C48", "C49", "C50", "C51",                                                            # groups, what ranks want
    "C53", "C55", "C56", "C57", "C58", "C60",                                                       # words, launch, install
]


def named_cases(source):
    """case -> names of the test functions of a module whose docstring names it."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            for case in re.findall(r"\bC\d\d\b", ast.get_docstring(node) or ""):
                found.setdefault(case, []).append(node.name)
    return found


def cases_in_tests():
    found = {}
    for path in sorted(TESTS.glob("**/test_*.py")):
        for case, names in named_cases(path.read_text()).items():
            found.setdefault(case, []).extend(f"{path.name}::{name}" for name in names)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_test_names_the_case(case):
    assert cases_in_tests().get(case), f"no test function under tests/ names {case} in its docstring"


def test_only_docstrings_of_tests_count():
    """A case in a comment, in a helper or in the text of a module is no test."""
    source = '"""C98"""\n# C97\ndef helper():\n    """C96"""\ndef test_a():\n    """C95: and C94, not C933."""\nclass TestB:\n'
    source += '    def test_b(self):\n        """C95"""\n'
    assert named_cases(source) == {"C95": ["test_a", "test_b"], "C94": ["test_a"]}
