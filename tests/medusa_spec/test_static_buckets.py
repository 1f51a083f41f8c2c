import pytest
import torch

from medusa_spec import static_buckets
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import FixedDraft
from medusa_spec.static_buckets import Buckets, capacity_for
from medusa_spec.tree import chain


@pytest.fixture
def read(llama, prompt):
    """`read(length)`: the backbone, a sealed cache and a hidden state."""
    backbone = Backbone(llama)

    def make(length=5):
        cache = SlabCache(backbone.config)
        out = backbone.forward(prompt(length), last_only=True, cache=cache)
        cache.seal(0)
        return backbone, cache, out.h[0, -1]

    return make


def draft(depth, key=None):
    guess = torch.zeros(depth, dtype=torch.long)
    return FixedDraft(shape=chain(depth), guess=lambda h: guess, key=key or depth)


def test_capacities_double():
    smallest = static_buckets.SMALLEST_CAPACITY
    found = [capacity_for(slots) for slots in (1, smallest, smallest + 1, 4 * smallest)]
    assert found == [smallest, smallest, 2 * smallest, 4 * smallest]


def test_a_bucket_is_made_once_and_one_capacity_shares_its_states(read):
    backbone, cache, h = read()
    buckets = Buckets()
    first = buckets.take(backbone, draft(2), cache, h, 40, eager=True)
    assert buckets.take(backbone, draft(2), read(9)[1], h, 60, eager=True) is first
    other = buckets.take(backbone, draft(3), cache, h, 40, eager=True)
    assert other is not first and other.step.cache is first.step.cache
    larger = buckets.take(backbone, draft(2), cache, h, 600, eager=True)
    assert larger.step.cache.capacity == 1024 and len(buckets) == 3
    assert buckets.take(backbone, draft(2), cache, h, 40, eager=True, backend="masked") is not first


def test_the_bucket_used_longest_ago_goes_first(read):
    backbone, cache, h = read()
    buckets = Buckets()
    for depth in (1, 2, 3, 4, 1, 5):
        buckets.take(backbone, draft(depth), cache, h, 40, eager=True)
    assert [bucket.step.tree.shape.max_depth for bucket in buckets.kept()] == [3, 4, 1, 5]


def test_weights_that_moved_make_a_bucket_anew(read):
    backbone, cache, h = read()
    buckets = Buckets()
    first = buckets.take(backbone, draft(2), cache, h, 40, eager=True)
    norm = backbone.model.model.norm
    norm.weight.data = norm.weight.data.clone()
    second = buckets.take(backbone, draft(2), cache, h, 40, eager=True)
    assert second is not first and len(buckets) == 1


def test_a_step_is_recorded_behind_a_prefix_that_leaves_room(read, cuda_stand_in):
    backbone, cache, h = read()
    buckets = Buckets()
    first = buckets.take(backbone, draft(2), cache, h, 40)
    assert first.reason is None and cuda_stand_in.log.count("record") == 1
    first.step.cache.cut(first.step.cache.capacity)  # a text that filled it to the end
    second = buckets.take(backbone, draft(3), cache, h, 40)
    assert second.reason is None and second.step.cache is first.step.cache
    assert second.step.cache.length.tolist() == [1]


def test_what_a_step_raises_is_raised(read, cuda_stand_in):
    backbone, cache, h = read()

    def fail(h):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Buckets().take(backbone, FixedDraft(shape=chain(1), guess=fail, key="fails"), cache, h, 40)


def test_a_step_that_cannot_be_recorded_is_kept_with_its_reason(read, cuda_stand_in):
    backbone, cache, h = read()

    def waits(h):
        return torch.full((1,), int(h.abs().argmax().item()))

    buckets = Buckets()
    bucket = buckets.take(backbone, FixedDraft(shape=chain(1), guess=waits, key="waits"), cache, h, 40)
    assert bucket.run is bucket.step and "_local_scalar_dense" in bucket.reason
    assert buckets.take(backbone, FixedDraft(shape=chain(1), guess=waits, key="waits"), cache, h, 40) is bucket
