"""python -m tpattn check: it works here; and where something is broken it says so, with the reason, and does not hang."""

import os
import re
import subprocess
import sys
import time

import pytest
from pool import ranks

from tpattn import comm, selfcheck
from tpattn.__main__ import main


def start(*argv, launcher=(), **env):
    command = [sys.executable, *launcher, "-m", "tpattn", *argv]
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    kept |= {"OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=100, check=False)


def heads(lines):
    return [line[:10].strip() for line in lines]


FACTS = ["versions", "back ends", "devices", "kernels", "kernels"]


def test_it_works_here_and_says_so():
    """Facts, groups, a sum, parity over tp and cp, the verdict."""
    begin = time.monotonic()
    done = start("check")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert time.monotonic() - begin < 40        # about 6 s on two idle cores
    assert heads(lines[:-1]) == [*FACTS, "groups", "all-reduce", "parity", "parity"]
    assert "torch 2." in lines[0] and "tpattn 0." in lines[0] and "gloo" in lines[1] and "cpu_flash" in lines[3]
    assert "parity      tp=2: loss and 21 gradients within " in lines[-3] and "cp=2" in lines[-2]
    assert lines[-1].startswith("tpattn works here: 2 processes compute what one does (")


@pytest.mark.long
def test_a_back_end_that_cannot_start_is_the_verdict():
    """A network interface that is not there: gloo finds no way between the processes."""
    done = start("check", GLOO_SOCKET_IFNAME="nowhere0")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert done.stderr == ""
    assert heads(lines[:5]) == FACTS
    assert lines[-1].startswith("tpattn does NOT work here: ") and "nowhere0" in lines[-1]


BROKEN = {
    "CheckFailed: the sum of 1 to 2 over the ranks is .*, wanted 3": (comm, "all_reduce", lambda x, group, **more: x.clone()),
    "CheckFailed: the gradient of .* is .* away from that of one process": (selfcheck, "finish_gradients", lambda model: None),
    "CheckFailed: the loss is .* away from that of one process": (selfcheck, "token_mean", lambda total, n, *, ctx: total / n),
}


@ranks(2)
@pytest.mark.parametrize("told", [None, *BROKEN])
def test_other_numbers_are_the_reason(rank, world, told):
    """A sum without the other rank, gradients that nobody summed, a loss without the other tokens; unbroken no fault."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    with pytest.MonkeyPatch.context() as patch:
        if told:
            patch.setattr(*BROKEN[told])
        faults = selfcheck._examine_here(told=False)
    assert len(faults) == bool(told), faults
    assert not told or re.match(told, faults[0]), faults


@pytest.fixture
def ranks_that(monkeypatch, capfd):
    """ranks_that(code, limit): exit status and last line of a check whose processes run this code instead."""

    popen = subprocess.Popen

    def run(code, limit):
        stand_in = [sys.executable, "-S", "-c", f"import os, sys, time; rank = os.environ['RANK']; {code}"]
        monkeypatch.setattr(selfcheck.subprocess, "Popen", lambda command, **options: popen(stand_in, **options))
        monkeypatch.delenv("RANK", raising=False)
        return selfcheck.check(limit), capfd.readouterr().out.splitlines()[-1]

    return run


def test_the_reason_is_the_ranks_own_and_not_that_it_was_lost(ranks_that):
    code = "sys.exit('PeerLost: a peer ended' if rank == '0' else 'a warning\\nRuntimeError: no way out')"
    assert ranks_that(code, 30) == (1, "tpattn does NOT work here: RuntimeError: no way out")
    assert ranks_that("os._exit(7)", 30) == (1, "tpattn does NOT work here: rank 0 ended with exit code 7")


def test_a_check_that_takes_too_long_ends_with_its_verdict(ranks_that):
    """The processes sleep instead of working."""
    begin = time.monotonic()
    status, verdict = ranks_that("time.sleep(60)", 0.5)
    assert status == 1 and re.match(r"tpattn does NOT work here: .*rank 0 had not ended", verdict)
    assert time.monotonic() - begin < 10


@pytest.mark.long
def test_under_torchrun_it_takes_the_ranks_that_are_there():
    done = start("check", launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"])
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert heads(lines[:-1]) == [*FACTS, "groups", "all-reduce", "parity", "parity"]
    assert "tp=3" in lines[-3] and lines[-1].startswith("tpattn works here: 3 processes")


def test_without_a_command_it_tells_what_there_is(capfd):
    assert [main([]), main(["chekc"])] == [0, 2]
    said = capfd.readouterr()
    assert said.out.startswith("usage: python -m tpattn check\n")
    assert said.err.startswith("error: chekc: not understood\nusage: python -m tpattn check\n")
