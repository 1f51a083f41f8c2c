"""Heads that attend read the text up to where they stand, and the draft from there on."""

import pytest
import torch

from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.view import View

H, V, K = 8, 20, 3
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12}
TAPPED = {"taps": "0,2"}
FAMILIES = [
    ("eagle", {}),
    ("eagle", {"tied": False, **GROUPED}),
    ("eagle", {"bias": True}),
    ("eagle3", TAPPED),
    ("eagle3", {"tied": False, **TAPPED, **GROUPED}),
    ("eagle3", {"from_h": False, **TAPPED}),
    ("eagle3", {}),
    ("fused", TAPPED),
    ("fused", {"tied": False, **TAPPED, **GROUPED}),
    ("fused", {}),
]
families = pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)


def text(options, batch=2, length=6, seed=0):
    """h [B, T, H], tokens [B, T, K] of real texts, and layers or None."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (batch, length + K), generator=generator)
    h = torch.randn(batch, length, H, dtype=torch.float64, generator=generator)
    layers = torch.randn(batch, length, 2, H, dtype=torch.float64, generator=generator) if "taps" in options else None
    return h, torch.stack([ids[:, 1 + k : 1 + k + length] for k in range(K)], dim=-1), layers


class OneRow(View):
    """One row at a time: sees all rows that were given to it before, as sums over single keys."""

    def __init__(self):
        self.rows = []

    def at(self, position):
        self.positions = torch.tensor([[position]])
        return self

    def attend(self, query, key, value):
        self.rows.append((key[0, :, 0], value[0, :, 0]))
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        found = []
        for head in range(heads):
            scores = torch.stack([query[0, head, 0] @ k[head // groups] / query.shape[-1] ** 0.5 for k, _ in self.rows])
            found.append(sum(w * v[head // groups] for w, (_, v) in zip(scores.softmax(0), self.rows, strict=True)))
        return torch.cat(found)[None, None]

    def update(self, key, value, *args, **kwargs):
        raise NotImplementedError("of layers that attend by themselves")

    seen = places = update


def one_by_one(heads, h, tokens, layers):
    """Features of one text, row by row: the layer over the true text, then over the draft that begins there."""
    length = len(h)
    begun = [heads.head(0).begin(h[t], None if layers is None else layers[t]) for t in range(length)]

    def step(k, feature, token, view, position):
        vector = heads.embedding(token)[None, None]
        return heads.head(k).step(feature[None, None], vector, view.at(position))[0, 0]

    inputs, found = begun, []
    if heads.num_sets == 1:
        found = [[None] * length for _ in range(K)]
        for t in range(length):
            view = OneRow()
            for j in range(t + 1):
                feature = step(0, begun[j], tokens[j, 0], view, j)
            found[0][t] = feature
            for k in range(1, K):
                feature = step(k, feature, tokens[t, k], view, t + k)
                found[k][t] = feature
    else:
        for k in range(K):
            outputs = []
            for t in range(length):
                view = OneRow()
                for j in range(t - k + 1):
                    feature = step(k, inputs[j], tokens[j, k], view, j + k)
                if k:  # its own row is not among those
                    feature = step(k, inputs[t], tokens[t, k], view, t + k)
                outputs.append(feature)
            found.append(outputs)
            inputs = outputs
    return [torch.stack([heads.head(k).features(z) for z in found[k]]) for k in range(K)]


@families
def test_features_equal_those_of_single_positions(make, kind, options):
    heads, _ = make(kind, trained=True, **options)
    h, tokens, layers = text(options)
    found = heads.features(h, tokens, layers)
    assert len(found) == K
    for row in range(len(h)):
        alone = one_by_one(heads, h[row], tokens[row], None if layers is None else layers[row])
        for k in range(K):
            torch.testing.assert_close(found[k][row], alone[k])


@families
def test_what_comes_later_changes_nothing(make, kind, options):
    heads, _ = make(kind, trained=True, **options)
    h, tokens, layers = text(options)
    before = heads.features(h, tokens, layers)
    other, other_tokens, other_layers = text(options, seed=1)
    for t in range(h.shape[1] - 1):
        changed = [
            torch.cat([one[:, : t + 1], two[:, t + 1 :]], dim=1) for one, two in ((h, other), (tokens, other_tokens))
        ]
        if layers is not None:
            changed.append(torch.cat([layers[:, : t + 1], other_layers[:, t + 1 :]], dim=1))
        after = heads.features(*changed)
        for k in range(K):
            torch.testing.assert_close(before[k][:, : t + 1], after[k][:, : t + 1])
            assert not torch.allclose(before[k][:, t + 1], after[k][:, t + 1])


@families
def test_a_step_depends_on_the_tokens_up_to_its_own_and_on_the_text(make, kind, options):
    """Step k reads the tokens t + 1 … t + 1 + k of its own row, and h and the next token of every row up to t."""
    heads, _ = make(kind, trained=True, **options)
    h, tokens, layers = text(options)
    before, last = heads.features(h, tokens, layers), h.shape[1] - 1
    for changed in range(K):
        other = tokens.clone()
        other[:, last, changed] = (other[:, last, changed] + 1) % V
        same = [
            torch.equal(a[:, last], b[:, last]) for a, b in zip(before, heads.features(h, other, layers), strict=True)
        ]
        assert same == [k < changed for k in range(K)]
    for row in range(last - K):  # rows whose tokens are all known, with a layer a step, too
        moved = [h.clone(), None if layers is None else layers.clone()]
        for tensor in moved:
            if tensor is not None:
                tensor[:, row] += 1.0
        after = heads.features(moved[0], tokens, moved[1])
        assert all(not torch.allclose(a[:, last], b[:, last]) for a, b in zip(before, after, strict=True))


@families
def test_padding_of_a_shorter_text_changes_nothing(make, kind, options):
    heads, _ = make(kind, trained=True, **options)
    h, tokens, layers = text(options, length=7)
    batch = heads.features(h, tokens, layers)
    for row, length in enumerate((7, 4)):
        cut = [None if part is None else part[row : row + 1, :length] for part in (h, tokens, layers)]
        for k, z in enumerate(heads.features(*cut)):
            torch.testing.assert_close(batch[k][row : row + 1, :length], z)


@families
def test_fewer_steps_are_the_first_ones(make, kind, options):
    heads, _ = make(kind, trained=True, **options)
    given = text(options)
    whole = heads.features(*given)
    for steps in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(heads.features(*given, steps), whole[:steps], strict=True))


@pytest.mark.parametrize("lm_head", LM_HEADS)
@families
def test_gradients_reach_every_parameter_and_nothing_of_the_target(make, kind, options, lm_head):
    heads, _ = make(kind, trained=True, lm_head=lm_head, **options)
    h, tokens, layers = text(options)
    heads(h, tokens, layers=layers).square().sum().backward()
    silent = [name for name, p in heads.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
    assert not heads.projection.weight.requires_grad and not heads.embedding.weight.requires_grad
    assert heads.projection.weight.grad is None and heads.embedding.weight.grad is None
    own = {id(parameter) for parameter in heads.parameters()}
    assert id(heads.projection.weight) not in own and id(heads.embedding.weight) not in own


@families
def test_logits_are_the_lm_heads_of_the_features(make, kind, options):
    heads, whole = make(kind, trained=True, draft=True, softcap=3.0, lm_bias=True, **options)
    h, tokens, layers = text(options)
    expected = torch.stack([whole(z) for z in heads.features(h, tokens, layers)])
    torch.testing.assert_close(heads(h, tokens, layers=layers), expected)
    assert expected.shape == (K, 2, 6, 6)


@families
def test_one_layer_a_step_and_no_more(make, kind, options):
    with pytest.raises(ValueError, match=f"num_layers must be 1 for {kind} heads, .* got 2"):
        make(kind, layers=2, **options)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_tied_steps_are_one_module(make, kind):
    tied, untied = (make(kind, tied=tied)[0] for tied in (True, False))
    assert len(tied.heads) == 1 and tied.head(0) is tied.head(K - 1)
    assert len(untied.heads) == K and untied.head(0) is not untied.head(K - 1)
    assert make(kind)[0].num_sets == 1  # as published


def test_tokens_must_be_given(make):
    with pytest.raises(ValueError, match="tokens must be given to eagle heads"):
        make("eagle")[0].features(torch.randn(1, 2, H))
