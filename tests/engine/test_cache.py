"""KVCache against a list of rows; attention against the textbook."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.drafters.injection import visible_rule
from blockdraft.engine.attention import additive, attend, visibility
from blockdraft.engine.cache import KVCache
from blockdraft.rules.proposal import Proposal

CPU = torch.device("cpu")


def write(cache, first, tokens):
    """One pass that stores each token's number as its key; returns the keys seen."""
    values = torch.tensor(tokens, dtype=torch.float32)
    rows, count = values.shape
    starts = torch.tensor(cache.lengths[first : first + rows])
    cache.open(first, starts[:, None] + torch.arange(count))
    keys = values[:, None, :, None].expand(-1, 2, -1, 3)
    return cache.update(keys, -keys, 0)[0]


def contents(cache, row):
    return cache.keys[0][row, 0, : cache.lengths[row], 0].tolist()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_hold_what_was_committed(data):
    """Random passes, paths, truncations and moves against plain lists; the buffers are never replaced."""
    cache, rows = KVCache(3, 64, torch.float32, CPU), [[], [], []]
    write(cache, 0, [[0.0]])
    buffer = cache.keys[0].data_ptr()
    counter = 1
    for _ in range(data.draw(st.integers(1, 6))):
        first = data.draw(st.integers(0, 2))
        several = data.draw(st.integers(1, 3 - first))
        count = data.draw(st.integers(1, 5))
        tokens = [[float(counter + i * count + j) for j in range(count)] for i in range(several)]
        counter += several * count
        write(cache, first, tokens)
        paths = [sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))) for _ in range(several)]
        cache.commit(paths)
        for i, path in enumerate(paths):
            rows[first + i] += [tokens[i][j] for j in path]
        if data.draw(st.booleans()):
            row = data.draw(st.integers(0, 2))
            length = data.draw(st.integers(0, len(rows[row])))
            cache.truncate(row, length)
            del rows[row][length:]
        if data.draw(st.booleans()):
            source, to = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
            cache.move(source, to)
            rows[to] = list(rows[source])
        assert [contents(cache, row) for row in range(3)] == rows
    assert cache.keys[0].data_ptr() == buffer


def test_a_pass_that_does_not_fit_is_an_error():
    cache = KVCache(1, 4, torch.float32, CPU)
    with pytest.raises(IndexError, match="5 tokens behind slot 0 do not fit into 4 slots"):
        cache.open(0, torch.arange(5)[None])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_visibility_is_what_the_rule_says_of_positions(data):
    """Ragged starts, trees, windows, causality: against a loop over single keys."""
    rows, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    cache = KVCache(rows, 32, torch.float32, CPU)
    cache.lengths = [data.draw(st.integers(0, 8)) for _ in range(rows)]
    parents = torch.tensor([[data.draw(st.integers(0, i)) for i in range(count - 1)] for _ in range(rows)], dtype=torch.long)
    widths = [data.draw(st.integers(1, count)) for _ in range(rows)]
    tree = Proposal(torch.zeros(rows, count - 1, dtype=torch.long), widths, parents.view(rows, count - 1))
    depths = torch.cat([torch.zeros(rows, 1, dtype=torch.long), tree.depths()], dim=1)
    span = cache.open(0, torch.tensor(cache.lengths)[:, None] + depths, tree.visible())
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 3]))
    seen = visibility(span, visible_rule(causal, window), CPU)
    for row in range(rows):
        start = cache.lengths[row]
        for node in range(count):
            ancestors = {node}
            while node < widths[row] and (top := min(ancestors)) > 0:
                ancestors.add(int(parents[row, top - 1]))
            query = start + int(depths[row, node])
            for slot in range(span.end):
                committed = slot < start
                position = slot if committed else start + int(depths[row, min(slot - start, count - 1)])
                related = (node < widths[row] or slot - start == node) if not committed else True
                expected = (committed or slot - start in ancestors) and related
                expected = expected and (not causal or position <= query)
                expected = expected and (window is None or (query - position < window and (causal or position - query < window)))
                assert bool(seen[row, 0, node, slot]) == expected


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_attend_equals_the_textbook(heads, sinks, softcap):
    torch.manual_seed(0)
    rows, count, length, size = 2, 3, 9, 8
    query, keys, values = (torch.randn(rows, h, n, size) for h, n in ((heads[0], count), (heads[1], length), (heads[1], length)))
    seen = torch.rand(rows, 1, count, length) > 0.4
    seen[..., 0] = True
    sink = torch.randn(heads[0]) if sinks else None
    group = heads[0] // heads[1]
    scores = query @ keys.repeat_interleave(group, 1).transpose(2, 3) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(rows, -1, count, 1)], dim=-1)
    expected = (torch.softmax(scores, -1)[..., :length] @ values.repeat_interleave(group, 1)).transpose(1, 2)
    out = attend(query, keys, values, additive(seen, torch.float32), 0.3, softcap, sink)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
