"""Settings of the whole suite: properties are judged by what they find, never by the clock, because
the machines are shared. `--quick` keeps the tests of tests/quick.py.
"""

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import chosen, stale

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --quick and --whole-grid."""
    parser.addoption("--quick", action="store_true", help="only the tests of tests/quick.py")
    parser.addoption("--whole-grid", action="store_true", help="every cell of sampled grids")


class Stale(pytest.Item):
    """A name of tests/quick.py that no test has."""

    def runtest(self) -> None:
        """Fail."""
        pytest.fail(f"tests/quick.py: no test has the name {self.name}", pytrace=False)


@pytest.hookimpl(tryfirst=True)  # before -k leaves out any
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what --quick does not sample. A name of tests/quick.py that no test has fails, so
    that the list follows the tests.
    """
    if config.getoption("--quick"):
        gone = stale([item.nodeid for item in items], config.args)
        out = [item for item in items if not chosen(item.nodeid)]
        items[:] = [item for item in items if chosen(item.nodeid)]
        items += [Stale.from_parent(session, name=name) for name in gone]
        config.hook.pytest_deselected(items=out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is imported by now out of every later garbage collection: with transformers among
    it that is 300,000 objects, which tests that collect rubbish would walk each time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Leave what a file's tests have left behind out of later collections, too: in a whole run it
    becomes millions of objects, which every close of a model would walk, 30 seconds in a test that
    takes 4 alone.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
