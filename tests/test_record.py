"""What a run tells and records: lines, a bar on a terminal, metrics.jsonl, the picture."""

import io
import json
import math

import pytest

from tpattn.training import METRICS, PICTURE, Record, draw_loss, read_metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(record, first, last, every=10):
    for step in range(first, last + 1):
        record.step(step, 5.0 / step, 1.0, 12345.6, 2_500_000_000 if step % every == 0 or step in (first, last) else None)
    record.close()


def test_off_a_terminal_there_are_plain_lines_and_nothing_else(tmp_path):
    out = io.StringIO()
    run(Record(tmp_path, steps=120, stream=out), 1, 120, every=60)
    assert out.getvalue().splitlines() == [
        "step   1/120   loss 5.0000   grad norm 1         12,346 tokens/s   2.50 GB",
        "step  60/120   loss 0.0833   grad norm 1         12,346 tokens/s   2.50 GB",
        "step 120/120   loss 0.0417   grad norm 1         12,346 tokens/s   2.50 GB",
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
    assert lines == [{"step": s, "loss": 5.0 / s, "grad_norm": 1.0, "tokens_per_second": 12345.6} for s in (1, 2, 3)]
    assert read_metrics(tmp_path) == lines
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_resumed_run_cuts_later_lines_and_what_was_left_half_written(tmp_path):
    run(Record(tmp_path, steps=9, stream=io.StringIO()), 1, 7)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 8, "lo')
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    record = Record(tmp_path, steps=9, done=5, stream=io.StringIO())
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    run(record, 6, 9)
    assert [m["step"] for m in read_metrics(tmp_path)] == list(range(1, 10))
    assert sorted(p.name for p in tmp_path.iterdir()) == [METRICS]
    Record(tmp_path, steps=9, stream=io.StringIO()).close()
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("steps", [0, 1, 2, 49, 50, 300])
def test_the_picture_is_a_png_for_any_number_of_steps(tmp_path, steps, capfd):
    entries = [{"step": s, "loss": 5 * math.exp(-s / 50), "grad_norm": 1.0} for s in range(1, steps + 1)]
    (tmp_path / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    path = draw_loss(tmp_path, "a title")
    assert path == tmp_path / PICTURE
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert capfd.readouterr() == ("", "")
