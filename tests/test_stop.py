"""A run is asked to stop: SIGTERM as often as it comes, Ctrl-C once; the second one, later, is the user's own."""

import os
import signal
import threading

import pytest

from tpattn.training import StopSignal, stop


def send(number):
    os.kill(os.getpid(), number)


def test_sigterm_may_come_more_than_once_and_what_was_there_comes_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as asked:
        assert not asked()
        for _ in range(3):
            send(signal.SIGTERM)
            assert asked() and asked.name == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_ctrl_c_is_torchruns_at_once_and_the_users_later(monkeypatch):
    with StopSignal() as asked:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert asked() and asked.name == "Ctrl-C"
        monkeypatch.setattr(stop, "_AGAIN_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with StopSignal() as asked, pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
        send(signal.SIGINT)
    assert asked.name == "SIGTERM"


def test_outside_the_main_thread_nothing_is_caught():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopSignal() as asked:
            seen.append((asked(), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
