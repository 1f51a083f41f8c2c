import pytest

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.medusa import medusa_layout, pattern

LINEAR, LM_HEAD = "h{head}.l{layer}.{part}", "h{head}.out{layer}"


def tensors(heads=2, layers=3, biases=True, lm_heads=True):
    parts = ("weight", "bias") if biases else ("weight",)
    found = [f"h{i}.l{j}.{part}" for i in range(heads) for j in range(layers) for part in parts]
    return found + [f"h{i}.out{layers}" for i in range(heads) if lm_heads]


def layout(names, found, **options):
    prefixed = {name: f"p.{name}" for name in found}
    return medusa_layout(names(), prefixed, format="F", linear=LINEAR, lm_head=LM_HEAD, **options)


def test_a_template_is_matched_whole_and_gives_its_numbers():
    match = pattern(LINEAR).fullmatch("h12.l3.bias")
    assert match and (match["head"], match["layer"], match["part"]) == ("12", "3", "bias")
    assert not any(
        pattern(LINEAR).fullmatch(name) for name in ("h1.l2.scale", "xh1.l2.bias", "h1xl2.bias", "h.l2.bias")
    )


def test_heads_and_blocks_are_counted_and_named_as_ours(names):
    found = layout(names, tensors())
    assert (found.num_heads, found.num_layers, found.own_lm_heads, found.biases) == (2, 3, True, True)
    assert len(found.names) == 14
    assert found.names["heads.1.blocks.2.linear.bias"] == "p.h1.l2.bias"
    assert found.names["heads.0.lm_head.weight"] == "p.h0.out3"


def test_blocks_without_biases(names):
    found = layout(names, tensors(biases=False), biases=False)
    assert not found.biases and not any("bias" in name for name in found.names)


def test_the_targets_lm_head_or_one_of_all(names):
    found = layout(names, tensors(lm_heads=False), shared="target")
    assert not found.own_lm_heads and found.one_lm_head is None
    found = layout(names, [*tensors(lm_heads=False), "one"], shared="one")
    assert not found.own_lm_heads and found.one_lm_head == "p.one"


def test_a_head_with_fewer_blocks_is_named(names):
    short = [name for name in tensors() if not name.startswith("h1.l2")]
    with pytest.raises(CheckpointError, match=r"must hold 14 tensors, got 12: missing \['h1\.l2\.bias', 'h1\.l2\.wei"):
        layout(names, short)
