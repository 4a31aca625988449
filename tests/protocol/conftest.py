"""A producer's grants, and their clock."""

import pytest

from kvferry.protocol.grants import Grants

from .granting import INCARNATION, LEASE, Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def grants(clock):
    return Grants(INCARNATION, LEASE, clock)
