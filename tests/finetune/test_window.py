"""What training logs."""

import torch

from medusa_spec.finetune.window import Window


def test_a_line_holds_means_since_the_last_and_forgets_them() -> None:
    window = Window()
    for value in (1.0, 3.0):
        window.add_losses(torch.tensor([value, 2 * value]), piece=0, masked=False)
        window.add_norms({0: value, 1: 0.5})
    line = window.drain(lambda tensor: tensor)
    assert line == {"loss_head_0": 2.0, "loss_head_1": 4.0, "grad_norm_head_0": 2.0, "grad_norm_head_1": 0.5}
    assert window.drain(lambda tensor: tensor) == {}


def test_pieces_of_a_step_add_up_and_processes_too() -> None:
    window = Window()
    for piece, value in enumerate((1.0, 3.0, 0.5)):
        window.add_losses(torch.tensor([value]), piece=piece, masked=False)
    assert window.drain(lambda tensor: 2 * tensor) == {"loss_head_0": 9.0}


def test_heads_that_join_later_are_logged_once_all_steps_train_them() -> None:
    window = Window()
    window.add_losses(torch.tensor([1.0]), piece=0, masked=False)
    window.add_losses(torch.tensor([1.0, 5.0]), piece=0, masked=False)
    assert window.drain(lambda tensor: tensor) == {"loss_head_0": 1.0}


def test_masked_batches_are_counted_once_each() -> None:
    window = Window()
    for piece in (0, 1, 0, 1):
        window.add_losses(torch.zeros(1), piece=piece, masked=True)
    assert window.drain(lambda tensor: tensor)["masked_batches"] == 2
