"""MTP heads (multi-token prediction): a decoder layer of the target's own class. Know tensors, not the model."""

from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_spec.heads.autoregressive import AutoregressiveHead, AutoregressiveHeads
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.sizes import LayerSizes
from medusa_spec.heads.target_config import config_of
from medusa_spec.heads.target_layer import TargetLayer
from medusa_spec.heads.view import View


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """What MTP heads can be told.

    Attributes:
        tied: One layer for all depths; otherwise one for each, as published.
        from_h: Features begin as h and stay of its size: there is no norm before W for them, and none behind the layer.
            Published layers have both; before the target's LM head the second must first grow to the size of h, which
            takes a short training longer than all the rest.
        decoder: Config of the layer, `model_type` among its values, see `target_config.more_layers`; None follows the
            target, or without one is a Llama layer of H.
    """

    tied: bool = True
    from_h: bool = True
    decoder: dict | None = field(default=None, hash=False)


class MtpHead(AutoregressiveHead):
    """One step: the next feature from this one and the token after it.

    ```
    from h       x = W [norm(e(token)), feature]            the LM head reads layer(x)
    published    x = W [norm(e(token)), norm(feature)]      the LM head reads norm(layer(x))
    ```

    W starts as the map to the (norm of the) feature, and the layer, of the target's own class, as the identity: a fresh
    head is the target's own LM head, or as published ranks tokens as that would for norm(h).

    Args:
        config: Sizes.
        projection: The target's LM head.
        options: The layer's config.
        k: Place of the step, from 0.

    Raises:
        ValueError: If the layers of the target cannot be used this way, or are of another width than h.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, options: MtpOptions, k: int) -> None:
        super().__init__(config, projection)
        decoder = options.decoder or llama_of(config)
        decoded = config_of(decoder)
        width = decoded.hidden_size
        if width != config.hidden_size:
            raise ValueError(
                f"decoder must have hidden_size = {config.hidden_size}, that of the heads, got {width}; leave it out, "
                "and it follows the target"
            )
        self.layer = TargetLayer(decoder, min(k, decoded.num_hidden_layers - 1), normed=not options.from_h)

    def step(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor:
        """See `AutoregressiveHead`."""
        return self.layer(feature, vector, view)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The LM head reads the feature itself."""
        return x


class MtpHeads(AutoregressiveHeads):
    """K steps of one layer, or of a layer each.

    Published layers, one for each step, were trained to read all rows of the text with the feature of the step before,
    whatever tokens it was guessed from. Here the layer of step k reads of the text the rows up to t - k, whose tokens
    are all known, and row t itself: up to k rows fewer, of which a draft would otherwise have to be read anew for every
    node. That changes guesses by little, and the output never.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; Gloeckle et al. 2024, "Better & Faster Large
    Language Models via Multi-token Prediction".
    """

    Options = MtpOptions

    def make_head(self, k: int) -> Any:
        """Steps are alike, unless the decoder's layers are not."""
        return MtpHead(self.config, self.projection, self.options, k)


def llama_of(config: HeadsConfig) -> dict[str, Any]:
    """A decoder of one Llama layer of H, with the sizes that heads take without a target."""
    sizes = LayerSizes().filled(config.hidden_size)
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }
