"""The config of a few more layers of a target's decoder, as plain values. Knows configs, no modules."""

import json
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

FULL = "full_attention"
FORGOTTEN = {
    "architectures",
    "auto_map",
    "dtype",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    "num_nextn_predict_layers",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
}
"""What configs say beside the shape of layers; how a checkpoint was stored changes no head."""


def more_layers(target: Any) -> dict[str, Any]:
    """The config of the layers that stand behind a target's last one.

    ```
    a target that ships MTP layers          its own config of them
    layer_types  [sliding, full, sliding]   [full]: one layer like the last with full attention
    ```

    Args:
        target: Config of the target's decoder; it is left as it is.

    Returns:
        Values for JSON, from which `config_of` makes the config again, `model_type` among them.
    """
    if getattr(target, "num_mtp_layers", None):
        return _plain(target.get_mtp_config())
    values, count = _plain(target), target.num_hidden_layers
    kinds = values.get("layer_types") or [FULL] * count
    like = max((layer for layer, kind in enumerate(kinds) if kind == FULL), default=count - 1)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == count and not name.endswith("token_id"):
            values[name] = [value[like]]
    if "layer_types" in values:
        values["layer_types"] = [FULL]
    if "first_k_dense_replace" in values:  # dense layers stand in front
        values["first_k_dense_replace"] = 0
    return values | {target.attribute_map.get("num_hidden_layers", "num_hidden_layers"): 1}


def _plain(config: Any) -> dict[str, Any]:
    """What a config says of its own kind of model, as JSON holds it."""
    values = json.loads(config.to_json_string(use_diff=False))
    for name, usual in json.loads(PreTrainedConfig().to_json_string(use_diff=False)).items():
        own_default = getattr(type(config), name, None) != getattr(PreTrainedConfig, name, None)
        if values.get(name) == usual and not own_default:
            values.pop(name, None)
    return {name: value for name, value in values.items() if not name.startswith("_") and name not in FORGOTTEN}


def config_of(values: dict[str, Any]) -> Any:
    """The config that `more_layers` gave as plain values.

    Raises:
        ValueError: If this version of transformers does not know the model, or the values.
    """
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # configs check themselves by errors of many types
        raise ValueError(
            f"decoder must be the config of a model that this version of transformers knows, got model_type "
            f"{values.get('model_type')!r}: {error}"
        ) from error
