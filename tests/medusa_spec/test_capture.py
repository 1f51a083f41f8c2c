"""A module's input is caught for the context that asks, and for no other."""

import threading

import pytest
import torch
from torch import nn

from medusa_spec.capture import CutError, capture_input, capturing, capturing_output


@pytest.fixture
def module():
    linear = nn.Linear(3, 3)
    linear.register_forward_pre_hook(capture_input)
    return linear


def test_inputs_are_collected_in_order_and_only_within(module):
    first, second = torch.zeros(1, 3), torch.ones(2, 3)
    module(first)
    with capturing() as captured:
        module(first)
        module(second)
    module(first)
    assert [tensor is expected for tensor, expected in zip(captured, (first, second), strict=True)] == [True, True]


def test_an_inner_context_does_not_disturb_the_outer_one(module):
    with capturing() as outer:
        with capturing() as inner:
            module(torch.zeros(1, 3))
        module(torch.ones(1, 3))
    assert len(inner) == len(outer) == 1
    assert outer[0].all()


def test_another_thread_s_forward_is_not_caught(module):
    with capturing(cut=True) as captured:
        failed = []

        def run():
            try:
                module(torch.zeros(1, 3))
            except CutError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not captured and not failed


def test_a_cut_ends_the_forward_before_the_module_computes(module, monkeypatch):
    monkeypatch.setattr(module, "forward", lambda x: pytest.fail("computed"))
    with capturing(cut=True) as captured, pytest.raises(CutError):
        module(torch.zeros(1, 3))
    assert len(captured) == 1


def test_nothing_is_caught_after_an_exception(module):
    with pytest.raises(ZeroDivisionError), capturing() as captured:
        raise ZeroDivisionError
    module(torch.zeros(1, 3))
    assert not captured


def test_what_leaves_a_module_is_collected_only_within_and_no_hook_is_left():
    module, x = nn.Linear(3, 3), torch.zeros(1, 3)
    with capturing_output(module) as captured:
        out = module(x)
    module(x)
    assert len(captured) == 1 and captured[0] is out
    assert not module._forward_hooks


def test_of_several_outputs_the_first_is_collected():
    module = nn.LSTM(3, 3)
    with capturing_output(module) as captured:
        out, _ = module(torch.zeros(1, 3))
    assert captured[0] is out


def test_what_leaves_a_module_in_another_thread_is_not_caught(module):
    with capturing_output(module) as captured:
        thread = threading.Thread(target=module, args=(torch.zeros(1, 3),))
        thread.start()
        thread.join()
    assert not captured
