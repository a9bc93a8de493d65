"""What one process of a standing pool does: it joins the others, then runs the bodies of tests until pytest is gone.

Nothing here knows pytest's session; pool.py sends a `Job` to every rank and gets `Passed`, `Skipped` or `Raised` back.
"""

import ctypes
import faulthandler
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import Passed, Raised, Skipped

MAX_GROUPS = 40     # a group costs 7 file descriptors and 3 threads: when tests have left this many, the pool is renewed


def serve(pipe, rank, world, folder):
    """The life of one rank."""
    try:
        _end_with_pytest()
        _write_to(folder / f"rank{rank}.log")
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=open(folder / f"rank{rank}.stack", "w"), all_threads=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)        # ^C is pytest's to handle
        _explain_asserts()
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world)        # a file, no port: two suites on a machine cannot meet
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
        answer = Passed()
    except BaseException as error:
        answer = _raised(error)
    home = _State()
    while True:
        try:
            pipe.send(answer)
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        home.restore()
        answer = _run(job, rank)
        if not isinstance(answer, Raised):
            answer = answer._replace(spent=home.spent())


def _run(job, rank):
    with warnings.catch_warnings(record=True) as caught:
        try:
            job = pickle.loads(job)
            _set_filters(job.filters)
            body = _find(job)
            kwargs = job.kwargs
            if "rank" in inspect.signature(body).parameters:
                kwargs = {**kwargs, "rank": rank}
            body(**kwargs)
            answer = Passed()
        except pytest.skip.Exception as skip:
            answer = Skipped(str(skip))
        except BaseException as error:
            return _raised(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    return answer._replace(warnings=tuple(_plain(warning) for warning in caught))


def _find(job):
    if job.root not in sys.path:
        sys.path.insert(0, job.root)
    found = importlib.import_module(job.module)
    *classes, name = job.name.split(".")
    for cls in classes:
        found = getattr(found, cls)
    test = getattr(found, name)
    return types.MethodType(test.body, found()) if classes else test.body


def _raised(error):
    here = [__file__, importlib.__file__]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    line = "".join(traceback.format_exception_only(type(error), error)).strip().split("\n")[0]
    return Raised(time.monotonic(), line, text)


class _State:
    """What a test could leave behind, as it was when the process started."""

    def __init__(self):
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.environment = dict(os.environ)
        self.folder = os.getcwd()

    def restore(self):
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():    # asked first: setting it imports torch's compiler, seconds
            torch.use_deterministic_algorithms(False)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)

    def spent(self):
        """Whether the default group is another one now, or tests that closed no context have left many groups."""
        if not dist.is_initialized() or dist.group.WORLD is not self.group:
            return True
        return len(dist.distributed_c10d._world.pg_map) > MAX_GROUPS


def _end_with_pytest():
    """Make this process die when pytest does, however pytest dies."""
    # The fork server ends when nobody holds the write end of its `alive` pipe, and multiprocessing gives each child one, so
    # that it can fork too. None here does: without it pytest's death ends the server, and the kernel then ends us.
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Elsewhere, and if the server was gone before that line: a thread that sees the end of a pipe that pytest holds.
    gone = multiprocessing.parent_process().sentinel

    def watch():
        multiprocessing.connection.wait([gone])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _write_to(path):
    """Send all output of this process, that of C++ included, to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))   # by lines: nothing is lost


def _explain_asserts():
    """Import test modules as pytest does, with `assert a == b` rewritten to show a and b."""
    # Private names of pytest (9.2): delete this function if they go; only the messages of bare asserts depend on it.
    from _pytest.assertion import rewrite

    config = types.SimpleNamespace(
        getini={"python_files": ["test_*.py"], "enable_assertion_pass_hook": False}.__getitem__,
        stash={rewrite.assertstate_key: types.SimpleNamespace(trace=lambda message: None)},
    )
    sys.meta_path.insert(0, rewrite.AssertionRewritingHook(config))


def _set_filters(filters):
    """Make the warning filters those of pytest's process."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        text, where = (part if isinstance(part, str | None) else part.pattern for part in (message, module))
        if isinstance(module, str):         # Python's own first filters hold plain text
            where = re.escape(module) + r"\Z"
        warnings.filterwarnings(action, text or "", category, where or "", line)


def _plain(warning):
    """A warning as values that can be sent, and compared with those of other ranks."""
    try:
        pickle.dumps(warning.category)
        category = warning.category
    except Exception:
        category = UserWarning
    return str(warning.message), category, warning.filename, warning.lineno
