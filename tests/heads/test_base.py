"""What every family refuses, and that all are known by name."""

import pytest
import torch

from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.heads.config import KINDS

H, V = 8, 20
EMBEDDING = TokenEmbedding(weight=torch.randn(V, H))


def config(kind, **changes):
    return HeadsConfig(**{"hidden_size": H, "vocab_size": V, "kind": kind, "num_heads": 2, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_of_another_model_is_refused(kind):
    with pytest.raises(ValueError, match="another model"):
        make_heads(config(kind), Projection(weight=torch.randn(V, H + 1)), None, EMBEDDING)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_vocabulary_must_be_given_as_the_config_says(kind):
    projection = Projection(weight=torch.randn(5, H))
    with pytest.raises(ValueError, match="draft_ids must be given"):
        make_heads(config(kind, draft_vocab_size=5), projection, None, EMBEDDING)
    with pytest.raises(ValueError, match="must hold draft_vocab_size = 5 ids, got 4"):
        make_heads(config(kind, draft_vocab_size=5), projection, torch.arange(4), EMBEDDING)


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trips_bit_for_bit(kind):
    projection = Projection(weight=torch.randn(V, H))
    first, second = (make_heads(config(kind), projection, None, EMBEDDING) for _ in range(2))
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter)
    second.load_state_dict(first.state_dict())
    h, tokens = torch.randn(1, 3, H), torch.randint(0, V, (1, 3, 2))  # a text, for families that attend
    assert torch.equal(first(h, tokens), second(h, tokens))


@pytest.mark.parametrize(
    ("embedding", "words"), [(None, "got none"), (TokenEmbedding(weight=torch.randn(V, 3)), "vectors of 3")]
)
def test_sequential_families_need_embeddings_of_the_targets_width(embedding, words):
    with pytest.raises(ValueError, match=words):
        make_heads(config("hydra"), Projection(weight=torch.randn(V, H)), None, embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_the_family_does_not_know_is_refused(kind):
    with pytest.raises(ValueError, match=f"options of {kind} heads must be among .*, got 'no_such'"):
        make_heads(config(kind, options={"no_such": 1}), Projection(weight=torch.randn(V, H)), None, EMBEDDING)


@pytest.mark.parametrize("kind", ["mlp_speculator", "recurrent", "eagle", "eagle3"])
def test_tied_heads_are_one_module(kind):
    for tied in (True, False):
        options = {"tied": tied}
        heads = make_heads(config(kind, options=options), Projection(weight=torch.randn(V, H)), None, EMBEDDING)
        assert heads.num_sets == len(heads.heads) == (1 if tied else 2)
        assert (heads.head(0) is heads.head(1)) == tied


@pytest.mark.parametrize("kind", KINDS)
def test_only_families_that_attend_read_layers_of_the_target(kind):
    heads = make_heads(config(kind), Projection(weight=torch.randn(V, H)), None, EMBEDDING)
    assert heads.taps == heads.taps_of(heads.options) == ()  # none unless they are told
    assert heads.sequential or not heads.attends
    assert heads.attends or not heads.mimics
