"""Classic speculative decoding: a smaller model's own greedy continuation is what is drafted, and output is the target's own."""

import pytest
import torch

from blockdraft.cli.main import main
from blockdraft.drafters.model import CHUNK, ModelDrafter
from blockdraft.errors import UsageError
from blockdraft.generation import generate
from blockdraft.load import load_drafter, load_target
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from tests import tiny
from tests.doubles import COUNT, run


def first_layers(family="llama", layers=3):
    """A model of the tiny target's own first layers."""
    whole = tiny.model(family)
    part = tiny.model(family, num_hidden_layers=layers)
    part.load_state_dict(whole.state_dict(), strict=False)
    return part


def test_drafts_are_the_smaller_models_own_words():
    """Observed in pieces, long and short, rows apart; cut back, and moved."""
    small = Target(first_layers())
    drafter = ModelDrafter(small, small.vocab_size)
    drafter.reset(2, 200)
    texts = [tiny.prompt(CHUNK + 30, 1), tiny.prompt(9, 2)]
    for row, text in enumerate(texts):
        for start in (0, len(text) - 6, len(text) - 3):
            stop = {0: len(text) - 6, len(text) - 6: len(text) - 3, len(text) - 3: len(text) - 1}[start]
            drafter.observe(row, torch.tensor([text[start:stop]]), None, [stop - start])
        if row == 0:
            drafter.propose(torch.tensor([5]), [4], None)
    proposal = drafter.propose(torch.tensor([text[-1] for text in texts]), [5, 3], None)
    for row, text in enumerate(texts):
        width = proposal.widths[row] - 1
        assert proposal.tokens[row, :width].tolist() == tiny.greedy(first_layers(), text, width)
    for length in (5, 2):
        drafter.truncate(0, length)
        drafter.observe(0, torch.tensor([texts[1][length:7]]), None, [7 - length])
        shown = drafter.propose(torch.tensor([texts[1][7]]), [5], None).tokens[0].tolist()
        mixed = [*texts[0][:length], *texts[1][length:8]] if length == 5 else [*texts[0][:2], *texts[1][2:8]]
        assert shown == tiny.greedy(first_layers(), mixed, 4)
    drafter.move(1, 0)
    assert drafter.propose(torch.tensor([texts[1][-1]]), [5], None).tokens[0].tolist() == tiny.greedy(first_layers(), texts[1], 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_output_is_the_targets_own(family, batch_size):
    target, plain = tiny.target(family), tiny.model(family)
    drafter = ModelDrafter(Target(first_layers(family)), target.vocab_size)
    prompts = [tiny.prompt(length, length) for length in (3, 12, 1, 80)]
    for request in run(target, drafter, prompts, batch_size):
        assert request.output == tiny.greedy(plain, request.prompt, COUNT)


def test_the_whole_target_drafts_without_fault(llama):
    [request] = run(llama, ModelDrafter(tiny.target("llama"), llama.vocab_size), [tiny.prompt(8, 1)])
    assert request.rounds == -(-(COUNT - 1) // 5)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_it_rests_where_a_conversation_outgrows_its_context(acceptance, llama):
    """Learned positions end there: no draft, no error, and output that is the target's own; a shorter row drafts again."""
    small = Target(first_layers("gpt2"))
    small.context = 24
    drafter = ModelDrafter(small, llama.vocab_size)
    how = {"acceptance": acceptance, "temperature": 1.0, "seed": 2} if acceptance == "rejection" else {}
    prompts = [tiny.prompt(length, length) for length in (10, 60, 5)]
    with pytest.warns(UserWarning, match="reads 24 tokens: longer conversations go on without drafts"):
        requests = run(llama, drafter, prompts, 1, **how)
    if acceptance == "match":
        for request in requests:
            assert request.output == tiny.greedy(tiny.model("llama"), request.prompt, COUNT)
    assert requests[1].plain_rounds == requests[1].rounds == COUNT - 1
    assert all(0 < request.plain_rounds < request.rounds for request in (requests[0], requests[2]))
    drafter.reset(1, 100)
    with pytest.warns(UserWarning, match="reads 24 tokens"):
        drafter.observe(0, torch.tensor([tiny.prompt(30, 1)]), None, [30])
    drafter.observe(0, torch.tensor([tiny.prompt(20, 2)]), None, [20])
    assert drafter.propose(torch.tensor([5]), [5], None).widths == [1]
    drafter.truncate(0, 0)
    drafter.observe(0, torch.tensor([tiny.prompt(9, 1)]), None, [9])
    assert drafter.propose(torch.tensor([5]), [5], None).widths == [5]


def test_a_row_that_is_outgrown_leaves_the_others_their_drafts(llama):
    small = tiny.target("llama")
    small.context = 24
    drafter = ModelDrafter(small, llama.vocab_size)
    prompts = [tiny.prompt(length, length) for length in (30, 4)]
    with pytest.warns(UserWarning, match="reads 24 tokens"):
        long, short = run(llama, drafter, prompts, 2)
    for request in (long, short):
        assert request.output == tiny.greedy(tiny.model("llama"), request.prompt, COUNT)
    assert long.plain_rounds == long.rounds == COUNT - 1
    assert short.rounds < COUNT / 2 and short.plain_rounds < short.rounds


def test_sampled_output(llama):
    """The seeded output is that of plain decoding; under the rejection rule a model that is the target itself is never refused."""
    prompts = [tiny.prompt(length, length) for length in (5, 9)]
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
    drafter = ModelDrafter(Target(first_layers()), llama.vocab_size)
    for drafted, plain in zip(run(llama, drafter, prompts, 2, **how), run(llama, None, prompts, **how), strict=True):
        assert drafted.output == plain.output
    same = ModelDrafter(tiny.target("llama"), llama.vocab_size)
    for request in run(llama, same, prompts, 2, temperature=0.9, seed=3, acceptance="rejection"):
        assert request.rounds == -(-(COUNT - 1) // 5)


def test_a_head_padded_otherwise(llama):
    """Rows that only one of the heads has are padding: never drafted, never missed."""
    for rows in (tiny.VOCABULARY - 4, tiny.VOCABULARY + 5):
        drafter = ModelDrafter(tiny.target("llama", vocab_size=rows), llama.vocab_size)
        prompt = [token % 60 for token in tiny.prompt(8, 1)]
        [request] = run(llama, drafter, [prompt])
        assert request.output == tiny.greedy(tiny.model("llama"), prompt, COUNT)


def test_as_a_user_meets_it(tiny_folder, tmp_path, capsys):
    target = load_target(tiny_folder, dtype="float32")
    drafter = load_drafter(tiny_folder, target)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    [result] = generate(target, ["ab"], drafter, sampling)
    assert result.method == "draft-model" and result.token_ids == generate(target, "ab", None, sampling)[0].token_ids
    with pytest.raises(UsageError, match="tree 8 needs a drafter whose tokens have probabilities"):
        generate(target, "ab", drafter, sampling, tree=8)
    base = ["bench", "--target", str(tiny_folder), "--dtype", "float32", "--tasks", "own", "--limit", "1", "--max-new-tokens", "6"]
    assert main([*base, "--methods", "ar,draft-model", "--drafter", str(tiny_folder), "--json"]) == 0
    assert '"method": "draft-model"' in capsys.readouterr().out
    assert main([*base, "--methods", "ar,draft-model"]) == 2
    assert "method draft-model needs a smaller language model" in capsys.readouterr().err


def test_another_tokenizer_is_refused(tiny_folder, tmp_path):
    from transformers import AutoTokenizer

    other = tiny.save_folder(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UsageError, match="has another tokenizer than target"):
        load_drafter(other, load_target(tiny_folder, dtype="float32"))
