"""Shared fixtures; tests run without any network, alone on two threads, or in several processes on one thread each."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two processes of two threads would wait for each other most of the time.
os.environ.update({"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {})

import pytest
import torch

from tests import tiny
from tests.doubles import random_drafter
from tests.recipes import train_tiny


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def llama():
    """The tiny target that most tests use."""
    return tiny.target("llama")


@pytest.fixture(scope="session")
def reference():
    """The same weights as ``llama``, in a model that blockdraft never touches."""
    return tiny.model("llama")


@pytest.fixture(scope="session")
def trained(llama):
    """A drafter trained for a few seconds on what ``llama`` says: it is right now and then."""
    return train_tiny(llama)


@pytest.fixture
def untrained(llama):
    return random_drafter(llama)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny.save_folder(tmp_path_factory.mktemp("target") / "tiny")
