"""What a run tells and records: lines, a bar on a terminal, metrics.jsonl and .csv, TensorBoard's files, the picture."""

import csv
import io
import json
import math
import sys

import pytest

from tpattn import Unsupported
from tpattn.training import BOARD, METRICS, PICTURE, TABLE, Record, draw_loss, need_tensorboard, read_metrics, record


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(record, first, last, every=10, **more):
    for step in range(first, last + 1):
        record.step(step, 5.0 / step, 1.0, 12345.6, 2_500_000_000 if step % every == 0 or step in (first, last) else None, **more)
    record.close()


def table(folder):
    """metrics.csv, its numbers as metrics.jsonl has them."""
    with (folder / TABLE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: json.loads(text) for name, text in row.items() if text} for row in rows]


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds) lets time pass for the record."""
    now = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


def test_off_a_terminal_there_are_plain_lines_and_nothing_else(tmp_path, clock):
    """The time left stands in the lines between the first step and the last."""
    out = io.StringIO()
    run(Record(tmp_path, steps=120, stream=out), 1, 120, every=60)
    assert out.getvalue().splitlines() == [
        "step   1/120   loss 5.0000   grad norm 1         12,346 tokens/s   2.50 GB",
        "step  60/120   loss 0.0833   grad norm 1         12,346 tokens/s   2.50 GB   0:00 left",
        "step 120/120   loss 0.0417   grad norm 1         12,346 tokens/s   2.50 GB",
    ]


def test_the_time_left_is_that_of_recent_steps_without_the_first(clock):
    """Two hundred slow steps are forgotten after fifty fast ones; the first one, which warms up, never counts."""
    out = io.StringIO()
    told = Record(None, steps=1000, last=500, stream=out)
    for step in range(1, 251):
        clock(60.0 if step == 1 else 10.0 if step <= 200 else 2.0)
        told.step(step, 1.0, 1.0, 1.0, 1)
    left = [line.partition(" GB")[2].strip() for line in out.getvalue().splitlines()]
    assert left[0] == ""
    assert left[1] == "1:23:00 left"            # 498 steps of 10 s
    assert left[199] == "50:00 left"
    assert left[249] == "8:20 left"             # 250 of 2 s, to the step this start ends with


def test_the_share_of_communication_and_validation_stand_in_the_lines_and_files(tmp_path):
    out = io.StringIO()
    told = Record(tmp_path, steps=30, stream=out)
    told.valid(0, 6.5)                          # before any step: only told
    told.step(1, 5.0, 1.0, 100.0, 10**9, comm_share=0.123)
    told.valid(1, 5.25)                         # after its step
    told.step(2, 4.0, 1.0, 100.0, comm_share=0.0)
    told.valid(3, 4.75)                         # before it
    told.step(3, 3.0, 1.0, 100.0, 10**9)
    told.valid(3, 9.0)                          # a second one: only told
    told.close()
    assert [line.split("   0:0")[0] for line in out.getvalue().splitlines()] == [
        "valid  0/30  loss 6.5000",
        "step  1/30   loss 5.0000   grad norm 1            100 tokens/s   1.00 GB    12% comm",
        "valid  1/30  loss 5.2500",
        "valid  3/30  loss 4.7500",
        "step  3/30   loss 3.0000   grad norm 1            100 tokens/s   1.00 GB",
        "valid  3/30  loss 9.0000",
    ]
    same = {"grad_norm": 1.0, "tokens_per_second": 100.0}
    assert read_metrics(tmp_path) == table(tmp_path) == [
        {"step": 1, "loss": 5.0, **same, "memory_bytes": 10**9, "comm_share": 0.123, "valid_loss": 5.25},
        {"step": 2, "loss": 4.0, **same, "comm_share": 0.0},
        {"step": 3, "loss": 3.0, **same, "memory_bytes": 10**9, "valid_loss": 4.75},
    ]


def test_on_a_terminal_a_bar_is_renewed_in_place_and_gone_at_the_end(monkeypatch):
    """Lines stand alone; a bar never reaches the last column, however narrow the terminal."""
    monkeypatch.setenv("TERM", "xterm")
    for columns in (120, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = Terminal()
        run(Record(None, steps=20, stream=out), 1, 20)
        text = out.getvalue()
        lines = text.split("\n")
        assert len(lines) == 4
        assert [line.split("\x1b[K")[-1].split("   ")[0] for line in lines] == ["step  1/20", "step 10/20", "step 20/20", ""]
        bars = [part.removesuffix("\x1b[K") for line in lines for part in line.split("\r") if part.startswith("[")]
        assert len(bars) == 19
        assert all(len(bar) < columns for bar in bars)
        assert bars[0].startswith("[#.......................] step"[: columns - 1])    # nothing is known of the time yet
        assert bars[9].startswith("[############............] 0:00 left   step"[: columns - 1])
        assert text.endswith("\r\x1b[K")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    run(Record(None, steps=3, stream=out), 1, 3)
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_metrics_have_a_line_per_step_that_reads_back_exactly(tmp_path):
    run(Record(tmp_path, steps=3, stream=io.StringIO()), 1, 3)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    told = [{"memory_bytes": 2_500_000_000}, {}, {"memory_bytes": 2_500_000_000}]      # when it was looked at
    assert lines == [
        {"step": s, "loss": 5.0 / s, "grad_norm": 1.0, "tokens_per_second": 12345.6, **more}
        for s, more in zip((1, 2, 3), told, strict=True)
    ]
    assert read_metrics(tmp_path) == table(tmp_path) == lines
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_resumed_run_cuts_later_lines_and_what_was_left_half_written(tmp_path):
    """metrics.csv too, whatever a killed run left of it: half a line, lines that metrics.jsonl lacks, or nothing."""
    run(Record(tmp_path, steps=9, stream=io.StringIO()), 1, 7)
    for half in ("8,0.1", "8,0.1,0.2,0.3,,,\n9,0", None):
        with (tmp_path / METRICS).open("a") as file:
            file.write('{"step": 8, "lo')
        assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
        if half is None:
            (tmp_path / TABLE).unlink()
        else:
            with (tmp_path / TABLE).open("a") as file:
                file.write(half)
        record = Record(tmp_path, steps=9, done=5, stream=io.StringIO())
        assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
        assert table(tmp_path) == read_metrics(tmp_path)
        record.valid(5, 0.5)
        assert [m.get("valid_loss") for m in read_metrics(tmp_path)] == [None] * 4 + [0.5]
        run(record, 6, 9)
        assert [m["step"] for m in read_metrics(tmp_path)] == list(range(1, 10))
        assert table(tmp_path) == read_metrics(tmp_path)
        (tmp_path / METRICS).write_text((tmp_path / METRICS).read_text().replace(', "valid_loss": 0.5', ""))
        Record(tmp_path, steps=9, done=7, stream=io.StringIO()).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [TABLE, METRICS]
    Record(tmp_path, steps=9, stream=io.StringIO()).close()
    assert read_metrics(tmp_path) == table(tmp_path) == []


def test_each_line_is_on_disk_before_the_next_step(tmp_path):
    """So a killed run loses no step: both files, without close."""
    record = Record(tmp_path, steps=9, stream=io.StringIO())
    record.step(1, 5.0, 1.0, 2.0)
    record.valid(1, 4.0)
    want = [{"step": 1, "loss": 5.0, "grad_norm": 1.0, "tokens_per_second": 2.0, "valid_loss": 4.0}]
    assert read_metrics(tmp_path) == table(tmp_path) == want
    record.close()


def test_without_tensorboard_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for attempt in (need_tensorboard, lambda: Record(tmp_path, steps=1, tensorboard=True)):
        with pytest.raises(Unsupported, match=r'pip install "tpattn\[tb\]"'):
            attempt()
    run(Record(tmp_path, steps=1, stream=io.StringIO()), 1, 1)      # and nobody else needs it


def test_tensorboard_has_the_numbers_and_a_resumed_run_hides_the_later_ones(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, last, loss in ((0, 5, 1.0), (3, 4, 2.0)):
        told = Record(tmp_path, steps=9, done=done, stream=io.StringIO(), tensorboard=True)
        for step in range(done + 1, last + 1):
            told.step(step, loss, 1.0, 2.0, 7, comm_share=0.5)
            told.valid(step, 3 * loss)
        told.close()
    seen = EventAccumulator(str(tmp_path / BOARD))
    seen.Reload()
    tags = ["comm_share", "grad_norm", "loss/train", "loss/valid", "memory_bytes", "tokens_per_second"]
    assert sorted(seen.Tags()["scalars"]) == tags
    for tag, first, second in (("loss/train", 1.0, 2.0), ("loss/valid", 3.0, 6.0)):
        assert [(e.step, e.value) for e in seen.Scalars(tag)] == [(s, second if s > 3 else first) for s in (1, 2, 3, 4)]


@pytest.mark.parametrize("steps", [0, 1, 2, 49, 50, 300])
def test_the_picture_is_a_png_for_any_number_of_steps(tmp_path, steps, capfd):
    entries = [{"step": s, "loss": 5 * math.exp(-s / 50), "grad_norm": 1.0} for s in range(1, steps + 1)]
    (tmp_path / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    path = draw_loss(tmp_path, "a title")
    assert path == tmp_path / PICTURE
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert capfd.readouterr() == ("", "")


def test_the_picture_has_training_validation_and_throughput(tmp_path, monkeypatch):
    """The curves as they are drawn, of a run with validation every 20 steps and one slow first step."""
    drawn = []
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    entries = [{"step": s, "loss": 2.0 + 1 / s, "tokens_per_second": 10.0 if s == 1 else 1000.0} for s in range(1, 101)]
    for entry in entries[19::20]:
        entry["valid_loss"] = entry["loss"] + 0.5
    (tmp_path / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    draw_loss(tmp_path)
    loss, speed = drawn[0].axes
    train, mean, valid = loss.lines
    assert list(train.get_ydata()) == [entry["loss"] for entry in entries]
    assert mean.get_ydata()[0] == 3.0 and mean.get_ydata()[1] == pytest.approx((3 + 2.5 + 2 + 1 / 3) / 3)
    assert mean.get_ydata()[50] == pytest.approx(sum(2 + 1 / s for s in range(47, 56)) / 9)
    assert list(valid.get_xdata()) == [20, 40, 60, 80, 100] and valid.get_ydata()[0] == 2.55
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [
        "training, each step", "training, running mean", "validation"]
    each, middle = speed.lines
    assert min(each.get_ydata()) == 10.0 and set(middle.get_ydata()) == {1000.0}
    assert speed.get_ylim()[0] == 0
