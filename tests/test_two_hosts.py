"""Two hosts over gloo: two network namespaces with a cable between them, each with its own torchrun, as in the README."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tpattn.training import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PLAN = [*["model=tiny", "train=smoke", "data.path=text", "optim.warmup_steps=2", "parallel=tp2", "train.log_every=1"],
        *["train.steps=24", "train.checkpoint_every=10"]]
pytestmark = pytest.mark.long


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


class Hosts:
    """Two namespaces named after this process; `cable(False)` cuts the link."""

    def __init__(self):
        self.names = [f"tpattn{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def make(self):
        """"" or why it is not possible here."""
        if shutil.which("ip") is None:
            return "no `ip` on this machine"
        for name in self.names:
            if (made := _ip("netns", "add", name)).returncode:
                return f"may not make network namespaces: {made.stderr.strip()}"
        a, b = self.names
        steps = [["link", "add", "tpa", "netns", a, "type", "veth", "peer", "name", "tpb", "netns", b]]
        for name, device, address in zip(self.names, ("tpa", "tpb"), self.addresses, strict=True):
            steps += [["-n", name, "addr", "add", f"{address}/24", "dev", device]]
            steps += [["-n", name, "link", "set", device, "up"], ["-n", name, "link", "set", "lo", "up"]]
        for step in steps:
            if (made := _ip(*step)).returncode:
                return f"may not join network namespaces: ip {' '.join(step)}: {made.stderr.strip()}"
        return ""

    def cable(self, whole):
        _ip("-n", self.names[0], "link", "set", "tpa", "up" if whole else "down")

    def remove(self):
        for name in self.names:
            _ip("netns", "del", name)

    def start(self, cwd, *argv):
        """torchrun on both hosts: (processes, their lines as they come)."""
        processes, outputs = [], []
        for rank, (name, device) in enumerate(zip(self.names, ("tpa", "tpb"), strict=True)):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank"]
            command += [str(rank), "--master-addr", self.addresses[0], "--master-port", "29533", "--nproc-per-node", "1"]
            kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
            process = subprocess.Popen(
                [*command, str(ROOT / "scripts" / "train.py"), *PLAN, *argv], cwd=cwd, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.STDOUT, env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
            )
            lines = []
            threading.Thread(target=lambda p=process, kept=lines: kept.extend(p.stdout), daemon=True).start()
            processes.append(process)
            outputs.append(lines)
        return processes, outputs


@pytest.fixture
def hosts():
    both = Hosts()
    fault = both.make()
    if fault:
        both.remove()
        pytest.skip(fault)
    yield both
    both.cable(True)
    both.remove()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(f"line {n} of document {i}: {n * n % 7}\n" for n in range(40)))
    return tmp_path


def wait_for(lines, pattern, limit=60):
    end = time.monotonic() + limit
    while not any(re.search(pattern, line) for line in list(lines)):
        assert time.monotonic() < end, f"{pattern!r} did not come:\n{''.join(lines)}"
        time.sleep(0.02)


def losses(folder):
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read_metrics(folder)]


def ended(processes, limit):
    try:
        return [process.wait(limit) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_link_cut_for_less_than_the_timeout_changes_nothing(hosts, place):
    """The numbers of two hosts, with a cut of 3 s, are those of two ranks on one; one folder, one line for each step."""
    processes, outputs = hosts.start(place, "run.dir=two", "parallel.timeout=60")
    wait_for(outputs[0], r"^step +3/")
    hosts.cable(False)
    time.sleep(3)
    before = len(losses(place / "two"))
    hosts.cable(True)
    assert ended(processes, 100) == [0, 0], "".join(outputs[0] + outputs[1])
    assert before < 24  # the cut fell into the run
    assert not any(line.startswith("step") for line in outputs[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = subprocess.run([*launch, str(ROOT / "scripts" / "train.py"), *PLAN, "run.dir=one"], cwd=place, capture_output=True,
                         text=True, env=environment, check=False)  # fmt: skip
    assert one.returncode == 0, one.stderr
    assert losses(place / "two") == losses(place / "one")


def test_a_link_cut_for_longer_ends_both_sides_with_a_named_error(hosts, place):
    """And when the cable is back, the same command goes on from the last checkpoint."""
    processes, outputs = hosts.start(place, "run.dir=two", "parallel.timeout=5", "train.steps=4000")
    wait_for(outputs[0], r"^step +12/")
    hosts.cable(False)
    begin = time.monotonic()
    for lines in outputs:
        wait_for(lines, r"(CollectiveTimeout|PeerLost): .*(in time|ended)", 60)
    assert time.monotonic() - begin < 40
    hosts.cable(True)
    codes = ended(processes, 100)
    assert all(code != 0 for code in codes)
    processes, outputs = hosts.start(place, "run.dir=two", "train.steps=4000", "train.stop_at=25")
    assert ended(processes, 100) == [0, 0], "".join(outputs[0] + outputs[1])
    wait_for(outputs[0], r"^resume  after step [12]0", 1)
