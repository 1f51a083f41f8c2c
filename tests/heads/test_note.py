"""Bytes that travel with adapters, and are no part of the heads' own state."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from medusa_spec.heads.note import Note, note_tensor


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calibration = Note()


def test_an_empty_note_says_nothing_and_is_in_no_state() -> None:
    model = Noted()
    assert model.calibration.read() == b""
    assert set(model.state_dict()) == {"linear.weight", "linear.bias"}
    model.load_state_dict(model.state_dict(), strict=True)


def test_a_note_of_any_length_is_loaded_and_survives_casts_and_copies() -> None:
    note = Note()
    note.load_state_dict({"text": note_tensor("möge".encode())})
    assert copy.deepcopy(note).to(torch.bfloat16).read().decode() == "möge"


def test_an_adapter_has_a_note_of_its_own() -> None:
    model = Noted()
    peft = get_peft_model(model, LoraConfig(r=1, target_modules=["linear"], modules_to_save=["calibration"]))
    model.calibration.modules_to_save["default"].load_state_dict({"text": note_tensor(b"maths")})
    own = {name: tensor for name, tensor in peft.state_dict().items() if name.endswith("text")}
    assert {name: bytes(tensor.tolist()) for name, tensor in own.items()} == {
        "base_model.model.calibration.modules_to_save.default.text": b"maths"
    }
    assert model.calibration.original_module.read() == b""
