"""The pools of ranks themselves: what a test finds in them, what a failure shows, and that nothing outlives pytest (C60).

The tests with `suite` run pytest on a small file of their own, in a process of its own, since they are about failures.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ranks

TESTS = Path(__file__).parent
HEAD = """
import os, time, warnings
import pytest, torch
import torch.distributed as dist
from pool import ranks
"""


@ranks(1, 2, 4)
@pytest.mark.parametrize("add", [0, 0.5])
def test_ranks_have_a_group_of_their_number(rank, world, add):
    total = torch.tensor([rank + add])
    dist.all_reduce(total)
    assert total.item() == world * (world - 1) / 2 + world * add
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world, "gloo")


@ranks(2)
def test_a_rank_has_one_thread_and_a_known_seed(rank):
    assert torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"
    drawn = torch.randn(3)
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(0)))


@ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_what_a_test_leaves_behind_is_gone(rank, turn):
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled() and "TPATTN_LEFT" not in os.environ
    assert Path.cwd() != Path("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["TPATTN_LEFT"] = "1"
    os.chdir("/")


@ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_the_default_group_may_be_destroyed(rank, world, turn):
    dist.barrier()
    dist.destroy_process_group()


@ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_pool_that_is_full_of_groups_is_renewed(rank, world, turn):
    assert len(dist.distributed_c10d._world.pg_map) < 10
    for _ in range(45):
        dist.new_group([0, 1])


@ranks(3)
def test_fixtures_reach_the_ranks(rank, world, tmp_path):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world


class TestInAClass:
    @ranks(2)
    def test_self_is_an_instance(self, rank):
        assert type(self).__name__ == "TestInAClass"


@ranks(2)
def test_a_collective_that_cuts_the_graph_is_an_error(rank, world):
    """C10: pytest's filter holds in the ranks."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    dist.all_reduce(y)
    with pytest.raises(UserWarning, match="autograd kernel was not registered"):
        y.sum().backward()


FAILING = """
def innermost():
    raise ValueError("broken here\\nsecond line")

@ranks(3)
def test_raise(rank, world):
    print("seen by", rank)
    if rank == 1:
        innermost()
    dist.barrier()

@ranks(3)
def test_after_raise(rank):
    dist.barrier()

@ranks(2)
def test_assert(rank):
    assert [rank, 5] == [0, 5]

@ranks(3)
def test_kill(rank):
    if rank == 2:
        os.kill(os.getpid(), 9)
    dist.barrier()

@ranks(3)
def test_after_kill(rank):
    dist.barrier()

@ranks(3)
def test_abort(rank):
    if rank == 2:
        os.abort()
    dist.barrier()

@ranks(3)
def test_late(rank):
    if rank == 1:
        import threading
        threading.Timer(0.3, os._exit, [5]).start()

def test_pause():
    time.sleep(1)

@ranks(3)
def test_after_late(rank):
    pass

@ranks(3)
def test_exit(rank):
    if rank == 2:
        os._exit(3)
    dist.barrier()

def asleep():
    time.sleep(1000)

@ranks(2, timeout=2)
def test_sleep(rank):
    if rank == 0:
        asleep()

@ranks(2)
def test_after_sleep(rank):
    dist.barrier()

@ranks(2)
def test_skip(rank):
    pytest.skip("not today")

@ranks(2)
def test_skip_alone(rank):
    if rank == 1:
        pytest.skip("alone")

@ranks(2)
def test_warn(rank):
    warnings.warn("mind this")

@ranks(2)
@pytest.mark.filterwarnings("error:mind that")
def test_warn_error(rank):
    warnings.warn("mind that")

@ranks(2)
@pytest.mark.parametrize("make", [lambda: 1])
def test_unsendable(rank, make):
    pass

@ranks(1, 2)
@pytest.mark.parametrize("layout", ["zigzag"])
def test_ids(rank, world, layout):
    print(f"pid={os.getpid()}.")
"""


@pytest.fixture(scope="module")
def failing(suite):
    """What pytest says of the file above."""
    return Result(suite.run(FAILING, "-rPs", "-vv"))


def test_a_rank_that_raises_shows_its_own_traceback(failing):
    said = failing.failure("test_raise[3ranks]")
    first = said.strip().splitlines()[0]
    assert first == "rank 1 of 3 raised ValueError: broken here"
    places = [said.index(part) for part in ("in innermost", "\nsecond line", "rank 0: was waiting", "rank 2: was waiting")]
    assert places == sorted(places)
    assert "[rank 0] seen by 0" in said and "[rank 2] seen by 2" in said
    assert said.count("Traceback") == 1 and "pool" not in said
    assert failing.seconds("test_raise[3ranks]") < 30     # not the 100 s that its peers would wait
    assert failing.outcome("test_after_raise[3ranks]") == "PASSED"


def test_asserts_show_their_values(failing):
    said = failing.failure("test_assert[2ranks]")
    assert "rank 1 of 2 raised AssertionError: assert [1, 5] == [0, 5]" in said and "rank 0: passed" in said


@pytest.mark.parametrize("how, told", [
    ("kill", "killed by SIGKILL"), ("abort", "killed by SIGABRT"), ("exit", "ended with exit code 3"),
])
def test_a_rank_that_dies_is_named(failing, how, told):
    """Its peers' broken connections come second, though they may be seen first."""
    said = failing.failure(f"test_{how}[3ranks]")
    assert said.strip().startswith(f"rank 2 of 3 {told}")
    assert failing.seconds(f"test_{how}[3ranks]") < 30
    assert failing.outcome("test_after_kill[3ranks]") == "PASSED"


def test_a_rank_that_dies_between_tests_is_told_with_the_test_before(failing):
    said = failing.failure("test_after_late[3ranks]")
    assert "rank 1 of 3 ended with exit code 5 before this test began" in said and "test_late[3ranks]" in said.split("\n")[1]


def test_a_rank_that_never_answers_shows_where_it_is(failing):
    said = failing.failure("test_sleep[2ranks]")
    assert said.strip().startswith("rank 0 of 2 gave no answer within 2 s")
    assert "in asleep" in said and "rank 1: passed" in said and "pool" not in said
    assert 2 <= failing.seconds("test_sleep[2ranks]") < 30
    assert failing.outcome("test_after_sleep[2ranks]") == "PASSED"


def test_a_skip_on_all_ranks_is_a_skip_and_on_some_a_failure(failing):
    assert failing.outcome("test_skip[2ranks]").startswith("SKIPPED") and "not today" in failing.text
    assert "rank 1 of 2 skipped the test (alone) and others did not" in failing.failure("test_skip_alone[2ranks]")


def test_warnings_of_ranks_are_passed_on_and_errors_hold(failing):
    assert "UserWarning: mind this" in failing.text
    assert "raised UserWarning: mind that" in failing.failure("test_warn_error[2ranks]")


def test_arguments_that_cannot_be_sent_are_refused(failing):
    assert "must be picklable" in failing.failure("test_unsendable[<lambda>-2ranks]")


def test_ids_name_the_ranks_and_the_session_tells_all(failing):
    assert failing.outcome("test_ids[zigzag-1rank]") == failing.outcome("test_ids[zigzag-2ranks]") == "PASSED"
    assert "10 failed, 8 passed, 1 skipped" in failing.text


def test_no_process_outlives_the_session(failing):
    pids = failing.pids()
    assert len(pids) == 3
    _all_gone(pids)


def test_ranks_refuses_what_it_cannot_run():
    with pytest.raises(TypeError, match="world sizes"):
        ranks()
    with pytest.raises(TypeError, match="world sizes"):
        ranks(lambda rank: None)

    def drawn(rank):
        pass

    drawn.hypothesis = None
    with pytest.raises(TypeError, match="draws its own examples"):
        ranks(2)(drawn)


def test_long_and_sampled_tests_wait_for_all(suite):
    body = """
    import pytest

    @pytest.mark.long
    def test_long():
        pass

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("i", range(9))
    def test_sampled(i):
        pass
    """
    assert suite.collect(body) == ["test_sampled[2]", "test_sampled[3]"]
    assert len(suite.collect(body, "--all")) == 10
    assert "test_long" in suite.collect(body, "-m", "long")[0]


def test_sessions_at_once_do_not_meet_and_a_killed_one_leaves_no_process(suite, tmp_path):
    """C60: no port and no file is shared; SIGKILL of pytest ends ranks that compute; the runs beside it and after it pass."""
    body = """
    @ranks(2, 3)
    @pytest.mark.parametrize("i", range(20))
    def test_it(rank, world, i):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
    """
    endless = f"""
    @ranks(2, 3)
    def test_it(rank, world):
        with open({str(tmp_path)!r} + f"/pid{{world}}{{rank}}", "w") as file:
            file.write(str(os.getpid()))
        while world == 3:
            pass
    """
    killed, beside = suite.start(endless), suite.start(body)
    deadline = time.monotonic() + 60
    while len(files := [f for f in tmp_path.glob("pid*") if f.read_text()]) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    killed.kill()
    killed.wait()
    after = suite.start(body)
    assert len(pids) == 5
    _all_gone(pids)
    for running in (beside, after):
        text = running.communicate(timeout=100)[0]
        assert "40 passed" in text, text


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Runs pytest on the text of a test file, with this suite's plugins and configuration, in a process of its own."""
    return Suite(tmp_path_factory.mktemp("suite"))


class Suite:
    def __init__(self, folder):
        self.folder, self.number = folder, 0

    def start(self, body, *options, head=HEAD):
        self.number += 1
        file = self.folder / f"number{self.number}" / "test_it.py"
        file.parent.mkdir()
        file.write_text(head + textwrap.dedent(body) + "\n")
        command = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "pyproject.toml", "--rootdir", file.parent,
                   "--basetemp", file.parent / "temp", "-p", "conftest", "-p", "no:cacheprovider",
                   "--durations=0", "--durations-min=0", *options, file]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=file.parent,
                                env={**os.environ, "PYTHONPATH": str(TESTS)})

    def run(self, body, *options, **more):
        return self.start(body, *options, **more).communicate(timeout=100)[0]

    def collect(self, body, *options):
        text = self.run(body, "--collect-only", "-q", *options, head="")
        return [line.split("::")[1] for line in text.splitlines() if "::" in line]


class Result:
    """What pytest printed with -vv and all durations."""

    def __init__(self, text):
        self.text = text

    def failure(self, test):
        parts = re.split(r"^_+ (\S+) _+$", self.text[self.text.index("= FAILURES ="):], flags=re.MULTILINE)
        assert test in parts, self.text
        return parts[parts.index(test) + 1].split("\n====")[0]

    def outcome(self, test):
        found = re.search(rf"::{re.escape(test)} (\w+)", self.text)
        assert found, self.text
        return found[1]

    def seconds(self, test):
        found = re.search(rf"^(\S+)s call .*::{re.escape(test)}$", self.text, flags=re.MULTILINE)
        assert found, self.text
        return float(found[1])

    def pids(self):
        return {int(found) for found in re.findall(r"pid=(\d+)\.", self.text)}


def _all_gone(pids, seconds=10):
    """Every process has ended (a zombie has) within some seconds; those that have not are ended here."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still running: {left}"


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
