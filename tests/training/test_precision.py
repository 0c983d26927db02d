"""Which dtype training multiplies in is measured, once per machine, and a named one is obeyed."""

import json

import pytest
import torch

from blockdraft.training import precision
from blockdraft.training.precision import CHOICES, fastest_dtype, measure
from blockdraft.training.run import precision_of
from tests.recipes import recipe

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "precision.json"


@pytest.mark.parametrize("fastest", CHOICES)
def test_the_faster_one_is_taken_said_once_and_kept(fastest, store, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(precision, "product_seconds", lambda dtype: asked.append(dtype) or (1.0 if dtype == fastest else 2.0))
    assert fastest_dtype(CPU) == fastest
    assert "GFLOP/s" in capsys.readouterr().err
    count = len(asked)
    assert set(asked) == set(CHOICES)
    assert fastest_dtype(CPU) == fastest
    assert len(asked) == count and capsys.readouterr().err == ""


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"machine": 3, "choice": 9}'])
def test_a_store_of_another_machine_or_damaged_is_measured_anew(broken, store, monkeypatch):
    monkeypatch.setattr(precision, "product_seconds", lambda dtype: 1.0 if dtype == torch.bfloat16 else 2.0)
    fastest_dtype(CPU)
    kept = json.loads(store.read_text())
    for text in (broken, json.dumps({**kept, "machine": "another", "choice": 0})):
        store.write_text(text)
        assert fastest_dtype(CPU) == torch.bfloat16
        assert json.loads(store.read_text()) == kept


def test_a_moment_of_other_work_does_not_decide():
    """The least time of several counts, taken in turn."""
    times = {torch.float32: iter([1.0, 9.0, 9.0, 9.0, 9.0, 9.0]), torch.bfloat16: iter([9.0, 9.0, 9.0, 9.0, 2.0, 9.0])}
    assert measure(lambda dtype: next(times[dtype])) == [1.0, 2.0]


def test_what_is_timed_are_real_products():
    assert all(precision.product_seconds(dtype) > 0 for dtype in CHOICES)


def test_a_store_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(precision, "product_seconds", lambda dtype: 1.0)
    assert fastest_dtype(CPU) == torch.float32


def test_named_ones_are_obeyed_and_gpus_multiply_bfloat16(tmp_path):
    for name in ("float32", "bfloat16"):
        config = recipe(tmp_path, tmp_path, tmp_path / "run", precision=name)
        assert precision_of(config, CPU) == getattr(torch, name)
    assert fastest_dtype(torch.device("cuda")) == torch.bfloat16
