"""What every test of tpattn has: the pools of ranks (pool.py), one thread, the options --all, and seeded hypothesis."""

import random

import hypothesis
import pytest

pytest_plugins = ["pool"]


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=0, help="so many more drawn moments at which test_survive.py kills a rank")
    parser.addoption("--all", action="store_true", help="also the tests marked long, every sample(n), more hypothesis examples")


def pytest_configure(config):
    hypothesis.settings.register_profile("some", max_examples=25, derandomize=True, deadline=None)
    hypothesis.settings.register_profile("all", max_examples=200, derandomize=True, deadline=None)
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "some")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests without ranks compute on small tensors: a second thread costs more than it gives, on a busy machine tenfold."""
    import torch  # not above: the fork server imports it while this process goes on

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Without --all leave out the tests marked long, and all but n cases of those marked sample(n)."""
    if config.getoption("--all"):
        return
    families = {}       # the cases of each sampled test
    left_out = set()
    for item in items:
        if item.get_closest_marker("long") and "long" not in config.getoption("-m"):
            left_out.add(item)
        elif mark := item.get_closest_marker("sample"):
            families.setdefault((item.parent.nodeid, item.originalname, mark.args[0]), []).append(item)
    for (_, name, n), cases in families.items():
        if len(cases) > n:
            left_out.update(random.Random(name).sample(cases, len(cases) - n))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
