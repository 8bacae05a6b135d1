"""Settings of the whole suite: properties are judged by what they find, never by the clock, because
the machines are shared. `--quick` keeps the tests of tests/quick.py.
"""

import gc

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import chosen

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --quick and --whole-grid."""
    parser.addoption("--quick", action="store_true", help="only the tests of tests/quick.py")
    parser.addoption("--whole-grid", action="store_true", help="every cell of sampled grids")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what --quick does not sample."""
    if config.getoption("--quick"):
        out = [item for item in items if not chosen(item.nodeid)]
        items[:] = [item for item in items if chosen(item.nodeid)]
        config.hook.pytest_deselected(items=out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is imported by now out of every later garbage collection: with transformers among
    it that is 300,000 objects, which tests that collect rubbish would walk each time.
    """
    gc.collect()
    gc.freeze()
