"""Routes can be told apart, and their order is from the fastest to the surest."""

import pytest

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.routes import ROUTES, AttentionRoute, LevelsRoute, MaskRoute, NodesRoute, PathsRoute


def test_the_fastest_is_tried_first_and_the_surest_last() -> None:
    assert ROUTES == (AttentionRoute, MaskRoute, PathsRoute, LevelsRoute, NodesRoute)
    assert len({route.name for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES[1:])
def test_other_routes_leave_the_models_own_attention_in_place(make_model, route) -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    backbone = Backbone(model)
    assert model.config._attn_implementation != before
    backbone.take(route)
    assert model.config._attn_implementation == before and backbone.attached
    backbone.check_unchanged()
    backbone.take(AttentionRoute)
    assert model.config._attn_implementation != before
    backbone.detach()
    assert model.config._attn_implementation == before and not backbone.attached


def test_a_wrapped_model_names_its_route(make_model, make_other) -> None:
    assert MedusaModel(make_model("llama"), drafter="ngram").route == "attention interface"
    assert MedusaModel(make_other("bloom"), drafter="ngram").route == "paths as batch rows"
