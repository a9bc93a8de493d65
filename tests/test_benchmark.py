"""scripts/benchmark.py runs every topic and prints its tables. How fast is never asserted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
SERIAL_AND_SHARDED = [
    "ratio", "quartiles", "processor", "serial ms", "sharded ms", "peak serial MiB", "peak rank MiB", "received MiB",
]


def run(*arguments, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


def table(topic, folder, *arguments):
    """The rows of a topic's table in its quick form, each a dict by column; one text more, what stands above it."""
    done = run(topic, "--quick", "--pairs", "2", *arguments, cwd=folder)
    assert done.returncode == 0 and not done.stderr, done.stderr
    above, lines = done.stdout.split("\n|", maxsplit=1)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in f"|{lines}".splitlines() if line.startswith("|")]
    heads, rule, *rows = cells
    assert rule == ["---"] * len(heads) and all(len(row) == len(heads) for row in rows)
    assert len(set(heads)) == len(heads)
    return [dict(zip(heads, row, strict=True)) for row in rows], above


def is_number(text):
    return re.fullmatch(r"\*\*\d+(\.\d+)?\*\*|\d+(\.\d+)?", text) is not None


@pytest.mark.long
@pytest.mark.parametrize(
    "topic, labels, count, received",
    [
        ("products", ["product", "offset", "pass"], 14, "0.19"),        # the other half of [1024, 96]
        ("attention", ["T", "mask", "dtype", "scheme"], 12, "0.06"),    # 128 x 2 x 16 of k, v, dk, dv
        ("seed", ["against"], 2, "0.13"),                               # 128 x 64 of the same
    ],
)
def test_a_topic_compares_serial_with_sharded(topic, labels, count, received, tmp_path):
    rows, above = table(topic, tmp_path)
    assert list(rows[0]) == labels + SERIAL_AND_SHARDED and len(rows) == count
    assert len({tuple(row[label] for label in labels) for row in rows}) == count
    assert all(is_number(row[head]) for row in rows for head in SERIAL_AND_SHARDED if head != "quartiles")
    assert rows[0]["received MiB"] == received
    assert "1.00 = sharding costs nothing" in above


@pytest.mark.long
def test_window_compares_the_time_of_a_pair(tmp_path):
    rows, above = table("window", tmp_path)
    times = ["ms", "ns per pair", "full kernel ns", "over T=512", "over full kernel", "quartiles"]
    assert list(rows[0]) == ["T", *times, "peak rank MiB", "received MiB"]
    assert [row["T"] for row in rows] == ["512", "1024"]
    assert rows[0]["over T=512"] == "**1.00**"
    assert {row["received MiB"] for row in rows} == {"0.03"}        # k and v, then dk and dv, of 127 tokens; mean of two
    assert "at most 1.10" in above and "at most 1.40" in above


@pytest.mark.long
def test_documents_compares_with_the_full_kernel(tmp_path):
    rows, above = table("documents", tmp_path)
    labels = ["longest", "documents", "mask", "layout", "grid", "10^6 pairs"]
    assert list(rows[0]) == [*labels, "ms", "first ms", "over full kernel", "quartiles", "peak rank MiB", "received MiB"]
    assert [(row["longest"], row["mask"], row["layout"]) for row in rows] == [
        (longest, mask, layout)
        for longest in ("32", "512") for mask in ("full", "causal") for layout in ("contiguous", "balanced")
    ]
    assert all(re.fullmatch("(ulysses|ring|merge) 2", row["grid"]) for row in rows)
    assert "at most 1.40" in above


@pytest.mark.long
def test_loss_compares_fused_with_unfused(tmp_path):
    rows, above = table("loss", tmp_path)
    numbers = ["ms", "over unfused", "quartiles", "processor", "peak rank MiB", "beyond gradients MiB", "received MiB"]
    assert list(rows[0]) == ["loss", *numbers]
    assert [row["loss"] for row in rows] == ["vocab_parallel_cross_entropy", "linear_cross_entropy"]
    assert rows[0]["over unfused"] == "**1.00**"
    assert {row["received MiB"] for row in rows} == {"0.13"}        # 2 numbers of 512 tokens, and the gradient [512, 64]
    assert "at most 1.15" in above and "1.0 MiB" in above


@pytest.mark.long
def test_block_compares_with_one_process_and_with_parallelize_module(tmp_path):
    rows, above = table("block", tmp_path)
    assert list(rows[0]) == ["dtype", "tokens", "block", *SERIAL_AND_SHARDED, "theirs / this", "quartiles of it"]
    assert [(row["dtype"], row["tokens"], row["block"]) for row in rows] == [
        (dtype, tokens, block) for dtype in ("float32", "bfloat16") for tokens, block in (
            ("whole", "parallelize_module"), ("whole", "tpattn"), ("divided", "parallelize_module"), ("divided", "tpattn"),
            ("divided", "tpattn, gathered again"))
    ]
    float32 = ["not counted", "0.25", "not counted", "0.25", "0.31"]        # 4 x [256, 64]
    assert [row["received MiB"] for row in rows] == [*float32, "not counted", "0.12", "not counted", "0.12", "0.16"]
    assert all(row["theirs / this"] == "**1.00**" for row in rows if row["block"] == "parallelize_module")
    assert "at least 0.98" in above and "0.25 MiB, 0.31 when gathered again" in above


@pytest.mark.long
def test_chunks_compares_pieces_with_one(tmp_path):
    rows, above = table("chunks", tmp_path)
    assert list(rows[0]) == ["tokens", "chunks", "ratio", "quartiles", "processor", "ms", "peak rank MiB", "received MiB"]
    assert [(row["tokens"], row["chunks"]) for row in rows] == [(t, n) for t in ("whole", "divided") for n in "124"]
    assert rows[0]["ratio"] == rows[3]["ratio"] == "**1.00**" and {row["received MiB"] for row in rows} == {"0.25"}
    assert "pieces pay" in above


@pytest.mark.long
def test_checkpoint_compares_with_torchs_own_and_restarts(tmp_path):
    rows, above = table("checkpoint", tmp_path)
    assert list(rows[0]) == ["what", "ms", "MiB/s", "ratio", "quartiles"]
    ways = ["torch load", "load", "hash", "torch save", "save", "5 steps", "5 steps, 1 save beside them", "restart"]
    assert [row["what"] for row in rows] == ways
    assert all(is_number(row["ms"]) for row in rows)
    assert "at least 0.5 of torch's" in above and "at most 10 s" in above


@pytest.mark.long
def test_memory_draws_a_picture_where_it_is_told(tmp_path):
    rows, above = table("memory", tmp_path, "--picture", "memory.png")
    assert list(rows[0]) == ["T", "scheme", "high water MiB", "growth MiB", "growth / q", "s", "received MiB"]
    assert [row["scheme"] for row in rows] == 2 * ["ring, exchange", "ring, rotate", "ulysses"]
    assert rows[0]["received MiB"] == "4.00" == rows[3]["received MiB"]     # the halo does not grow with T; all heads do:
    assert [row["received MiB"] for row in rows if row["scheme"] == "ulysses"] == ["8.00", "32.00"]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "linear in T" in above


def test_a_topic_that_is_not_there_is_refused(tmp_path):
    done = run("product", cwd=tmp_path)
    assert done.returncode == 2 and "there is no topic 'product'; there are products" in done.stderr


def test_a_picture_in_a_folder_that_is_not_there_is_refused(tmp_path):
    done = run("memory", "--picture", "no/memory.png", cwd=tmp_path)
    assert done.returncode == 2 and "there is no folder no" in done.stderr
