"""Batches: every conversation is read, every anchor is sound, and order depends on nothing but the seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.errors import UsageError
from blockdraft.training.batches import Batches, Document, draw_anchors, pack

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(2, 20)), min_size=1, max_size=25)


def documents(sizes):
    return [Document(f"k{i}", "s", list(range(100 * i, 100 * i + p + a)), p) for i, (p, a) in enumerate(sizes)]


@given(shapes, st.integers(0, 5), st.integers(3, 9))
@settings(max_examples=40, deadline=None)
def test_packing_loses_nothing(sizes, seed, most):
    docs = documents(sizes)
    rows = pack(docs, 32, most, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(docs)))
    assert all(sum(len(docs[i].ids) for i in row) <= 32 and len(row) <= most for row in rows)
    assert rows == pack(docs, 32, most, seed)


@given(shapes, st.integers(0, 3), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_anchors_are_answer_tokens_with_labels_of_their_own_document(sizes, seed, rows):
    docs = documents(sizes)
    batches = Batches(docs, 32, 8, rows, seed)
    trained = set()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(batches.step(step), 0)
        labels, inside = batch.labels(4)
        for row, members in enumerate(batch.members):
            for a in range(8):
                if not batch.real[row, a]:
                    assert not inside[row, a].any()
                    continue
                at = int(batch.anchors[row, a])
                number = int(batch.documents[row, at])
                document = docs[members[number]]
                position = int(batch.positions[row, at])
                assert int(batch.ids[row, at]) == document.ids[position]
                assert document.start <= position < len(document.ids) - 1
                expected = document.ids[position + 1 : position + 4]
                assert labels[row, a][: len(expected)].tolist() == expected
                assert inside[row, a].tolist() == [k < len(expected) for k in range(3)]
                trained.add(document.key)
            drawn = batch.anchors[row][batch.real[row]].tolist()
            assert drawn == sorted(set(drawn))
    assert trained == {d.key for d in docs}  # short conversations are trained too


def test_order_and_anchors_change_with_the_epoch_and_not_with_the_parts():
    docs = documents([(3, 17)] * 23)
    batches = Batches(docs, 40, 8, 4, 0)
    first = [batches.step(step) for step in range(batches.steps_per_epoch)]
    second = [batches.step(step + batches.steps_per_epoch) for step in range(batches.steps_per_epoch)]
    rows = sorted(row for step in first for row in step if row is not None)
    assert rows == sorted(row for step in second for row in step if row is not None) == list(range(len(batches.packed)))
    assert first != second
    again = Batches(docs, 40, 8, 4, 0)
    for step in range(2 * batches.steps_per_epoch):
        halves = [again.step(step, part, 2) for part in (0, 1)]
        assert [row for pair in zip(*halves, strict=True) for row in pair] == batches.step(step)
    assert not torch.equal(batches.batch([0], 0).anchors, batches.batch([0], 1).anchors)
    assert torch.equal(batches.batch([0, 1], 1).anchors[1], batches.batch([1], 1).anchors[0])


def test_every_document_has_an_anchor_before_any_has_two():
    eligible = [torch.arange(0, 100), torch.tensor([105]), torch.arange(110, 112)]
    for seed in range(20):
        anchors = draw_anchors(eligible, 3, seed).tolist()
        assert [sum(low <= a < high for a in anchors) for low, high in ((0, 100), (105, 106), (110, 112))] == [1, 1, 1]
    assert draw_anchors(eligible, 200, 0).tolist() == [*range(100), 105, 110, 111]
    assert draw_anchors([], 4, 0).tolist() == []


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(UsageError, match="k0 has 40 tokens, a row has sequence_length 32"):
        pack(documents([(20, 20)]), 32, 4, 0)
