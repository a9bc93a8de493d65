"""Tests that run on several ranks: the `@ranks` decorator and the standing pools of processes behind it.

    @ranks(2, 4)
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_ring_equals_one_process(rank, world, layout): ...

is collected as test_ring_equals_one_process[zigzag-2ranks] and so on. The body runs once per rank in a pool of `world` processes
that is started when the first test asks for that size and serves until the session ends; what a rank's process does stands in
pool_rank.py. Parameters and fixtures are resolved here, in pytest's process, and must be picklable (`tmp_path` is). A failure
takes the pool down at once, by the ids of its own processes, and the next test gets a new one. This file is a pytest plugin
(conftest.py names it).
"""

import functools
import inspect
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest

LIMIT_SECONDS = 100     # for one test, unless `@ranks(2, timeout=...)` says otherwise
GRACE_SECONDS = 0.3     # what the others get after the first failure, so that the report can say how they fared
START_SECONDS = 90      # for a pool to start; it takes less than a second once the fork server has imported torch

FORKS = multiprocessing.get_context("forkserver")
# What the fork server imports once for all pools. Not tpattn: a mistake in it must fail a test, not the server.
PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "einops", "numpy",
           "hypothesis", "pytest", "torch._dynamo"]


def ranks(*worlds, timeout=LIMIT_SECONDS):
    """Run the test's body once per rank, for each of these world sizes.

    The body may name `rank` and `world`, next to its parameters and fixtures. It finds a default process group (gloo) of `world`
    ranks, one thread, and torch.manual_seed(0). timeout: seconds until the ranks are stopped and the test fails.
    """
    if not worlds or not all(isinstance(world, int) and world > 0 for world in worlds):
        raise TypeError(f"@ranks{worlds}: name one or more world sizes, such as @ranks(2, 4)")

    def decorate(body):
        if hasattr(body, "hypothesis"):
            raise TypeError(f"{body.__name__}: under @given each rank draws its own examples; parametrise over seeds instead")

        @functools.wraps(body)
        def test(*instance, **kwargs):
            POOLS.run(body, kwargs["world"], kwargs, timeout)

        signature = inspect.signature(body)
        shown = [p for p in signature.parameters.values() if p.name not in ("rank", "world")]
        world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*shown, world])      # what pytest must fill in: all but `rank`
        test.body = body                                                        # what the ranks call
        test = pytest.mark.parametrize("world", worlds, ids=[f"{w}rank{'s' * (w > 1)}" for w in worlds])(test)
        return pytest.mark.timeout(timeout + 20)(test)                          # the pool's own limit comes first

    return decorate


class Job(NamedTuple):
    root: str           # the folder from which the test's module is imported
    module: str
    name: str           # qualified, so also "TestClass.test_method"
    kwargs: dict
    filters: tuple      # pytest's warning filters, those of the test's own marks included


class Passed(NamedTuple):
    warnings: tuple = ()
    spent: bool = False     # the test left this process in a state that no other test should meet

    def __str__(self):
        return "passed"


class Skipped(NamedTuple):
    reason: str
    warnings: tuple = ()
    spent: bool = False

    def __str__(self):
        return f"skipped ({self.reason})"


class Raised(NamedTuple):
    at: float               # time.monotonic(), which all processes of a machine share
    line: str               # type and first line of the message
    traceback: str


class Died(NamedTuple):
    """The process of a rank ended before it gave an answer: exit code, minus the signal's number if a signal ended it."""

    code: int | None
    before: str = ""        # the test before, when the process was gone as this one began

    def __str__(self):
        killed = self.code is not None and self.code < 0
        how = f"killed by {_signal_name(-self.code)}" if killed else f"ended with exit code {self.code}"
        return how + (f" before this test began; it had passed {self.before}" if self.before else "")


class Pool:
    """`world` processes with a process group among them. Any failure ends it: ask `Pools` for the next."""

    def __init__(self, world, folder):
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix=f"{world}ranks-", dir=folder))
        self.before = "none yet"
        self.processes, self.pipes, self.logs = [], [], []
        try:
            _start_fork_server()
            for rank in range(world):
                for kind in ("log", "stack"):
                    (self.folder / f"rank{rank}.{kind}").touch()
                self.logs.append(open(self.folder / f"rank{rank}.log", errors="replace"))
                ours, theirs = FORKS.Pipe()
                process = FORKS.Process(target=_serve, args=(theirs, rank, world, self.folder), daemon=True)
                self.pipes.append(ours)
                process.start()
                self.processes.append(process)
                theirs.close()
            answers = self._answers(time.monotonic() + START_SECONDS)
            if any(not isinstance(answers.get(rank), Passed) for rank in range(world)):
                report = self._report(answers, START_SECONDS)
                self._show_output()
                pytest.fail("a pool of ranks did not start: " + report, pytrace=False)
        except BaseException:
            self.kill()
            raise

    def run(self, job, limit):
        """The answers of all ranks to a pickled job, or pytest's skip or failure."""
        usable = False
        try:
            gone = {}
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send_bytes(job)
                except OSError:
                    gone[rank] = self._died(rank)._replace(before=self.before)
            answers = self._answers(time.monotonic() + limit, gone)
            kinds = {type(answers.get(rank)) for rank in range(self.world)}
            alike = len(kinds) == 1 and kinds <= {Passed, Skipped}
            text = "" if alike else self._report(answers, limit)    # before the output is shown: it may ask for more of it
            self._show_output()
            if not alike:
                pytest.fail(text, pytrace=False)
            usable = not any(answer.spent for answer in answers.values())
        finally:
            if not usable:      # also when pytest-timeout or ^C comes through here
                self.kill()
        self.before = os.environ.get("PYTEST_CURRENT_TEST", "another test")
        _pass_on_warnings(answers.values())
        if kinds == {Skipped}:
            pytest.skip(answers[0].reason)

    def kill(self):
        """End the processes, at once and by their own ids, and remove what they shared."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        for log in self.logs:
            log.close()
        self.processes, self.pipes, self.logs = [], [], []
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def alive(self):
        return bool(self.processes)

    def _answers(self, deadline, answers=None):
        """What each rank said until the deadline, which comes close as soon as one has failed."""
        answers = dict(answers or {})
        while True:
            if any(not isinstance(answer, (Passed, Skipped)) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            asked = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(asked), max(0.0, deadline - time.monotonic())) if asked else []
            if not ready:
                return answers
            for pipe in ready:
                try:
                    answers[asked[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    answers[asked[pipe]] = self._died(asked[pipe])

    def _died(self, rank):
        self.processes[rank].join(5)
        return Died(self.processes[rank].exitcode)

    def _report(self, answers, limit):
        """The text of a failure: the rank to look at in full, one line for each of the others."""
        silent = [rank for rank in range(self.world) if rank not in answers]
        dead = [rank for rank, answer in answers.items() if isinstance(answer, Died)]
        raised = sorted((answer.at, rank) for rank, answer in answers.items() if isinstance(answer, Raised))
        skipped = [rank for rank, answer in answers.items() if isinstance(answer, Skipped)]
        of = f"of {self.world}"
        if dead:            # its peers may have raised sooner than its end was seen: their connection broke
            first = dead[0]
            text = f"rank {first} {of} {answers[first]}"
        elif raised:
            first = raised[0][1]
            text = f"rank {first} {of} raised {answers[first].line}\n{answers[first].traceback.rstrip()}"
        elif silent:
            first = None
            named = ", ".join(map(str, silent))
            text = f"rank{'s' * (len(silent) > 1)} {named} {of} gave no answer within {limit:g} s" + self._stacks(silent)
        else:
            first = skipped[0]
            text = f"rank {first} {of} skipped the test ({answers[first].reason}) and others did not"
        others = [f"rank {rank}: {_in_one_line(answers.get(rank))}" for rank in range(self.world)
                  if rank != first and (first is not None or rank not in silent)]
        return "\n".join([text, *others])

    def _stacks(self, silent):
        """Where the ranks that gave no answer are: each writes its stack when it gets SIGUSR1."""
        for rank in silent:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = []
        for rank in silent:
            text = (self.folder / f"rank{rank}.stack").read_text()
            stack = [line for line in text.splitlines() if line.startswith("  File")]
            body = list(itertools.takewhile(lambda line: "/pool_rank.py" not in line, stack))
            parts.append(f"\nrank {rank} was here, innermost call first:\n" + "\n".join(body or stack))
        return "".join(parts)

    def _show_output(self):
        """What the ranks wrote during this test, into pytest's capture: it shows it for a failure, and with -s or -rP."""
        for rank, log in enumerate(self.logs):
            for line in log.read().splitlines():
                print(f"[rank {rank}] {line}")


class Pools:
    """One pool for each world size that was asked for."""

    def __init__(self):
        self.pools = {}
        self.folder = None

    def run(self, body, world, kwargs, timeout):
        names = inspect.signature(body).parameters
        job = Job(
            root=str(Path(inspect.getfile(body)).parents[body.__module__.count(".")]),
            module=body.__module__,
            name=body.__qualname__,
            kwargs={name: value for name, value in kwargs.items() if name in names},
            filters=tuple(warnings.filters),
        )
        try:
            job = pickle.dumps(job)
        except Exception as error:
            pytest.fail(f"the arguments of a @ranks test go to other processes and must be picklable: {error}", pytrace=False)
        if world not in self.pools or not self.pools[world].alive:
            self.pools[world] = Pool(world, self.folder)
        self.pools[world].run(job, timeout)

    def close(self):
        for pool in self.pools.values():
            pool.kill()
        self.pools.clear()


POOLS = Pools()


def pytest_configure(config):
    if not config.option.collectonly:
        _start_fork_server()    # now, so that it imports torch while this process does: the first pool comes seconds sooner


@pytest.fixture(scope="session", autouse=True)
def _pools(tmp_path_factory):
    POOLS.folder = tmp_path_factory.mktemp("pools")
    yield
    POOLS.close()


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:      # a real-time signal
        return f"signal {number}"


def _in_one_line(answer):
    if answer is None:
        return "was waiting or still at work, and was stopped"
    if isinstance(answer, Raised):
        return f"raised {answer.line}"
    return str(answer)


def _pass_on_warnings(answers):
    """The ranks' warnings into pytest's summary, each once."""
    for message, category, filename, line in sorted({w for answer in answers for w in answer.warnings}, key=str):
        warnings.warn_explicit(message, category, filename, line)


def _start_fork_server():
    """Start the process from which all ranks are forked, unless it runs: it imports torch once, without threads of its own.

    The ranks inherit its environment: what a test changes in pytest's process does not reach them.
    """
    FORKS.set_forkserver_preload(PRELOAD)
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")    # whatever this machine's name is
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(*args):
    # Not imported above: it imports torch, and pytest's process has the fork server to start first.
    import pool_rank

    pool_rank.serve(*args)
