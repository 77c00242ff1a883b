"""A folder of tests that silently collects nothing is a failure."""

import pytest

from tests.conftest import COLLECTED

MINIMUM = {"clients": 65, "engine": 650, "kernels": 1000, "service": 360, "tooling": 70}


def test_enough_tests_are_collected(request: pytest.FixtureRequest) -> None:
    arguments = request.config.invocation_params.args
    if any("tests/" in str(argument) or str(argument).startswith("-k") for argument in arguments):
        pytest.skip("a part of the suite was asked for")
    counts = request.config.stash[COLLECTED]
    assert {name: counts.get(name, 0) for name, least in MINIMUM.items() if counts.get(name, 0) < least} == {}
