"""The attention interface is the route of models that have it, and asks for positions."""

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes import AttentionRoute


def test_a_tree_pass_is_plain_decoding_of_every_path(any_model, text) -> None:
    asked = text(any_model, AttentionRoute)
    torch.testing.assert_close(asked.tree(), asked.expected(), rtol=0, atol=1e-6)


def test_models_without_positions_are_refused_in_words(make_other) -> None:
    with pytest.raises(UnsupportedError, match="MambaForCausalLM.forward takes no position_ids"):
        Backbone(make_other("mamba")).route.check()
