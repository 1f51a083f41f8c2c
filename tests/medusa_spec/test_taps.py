"""What enters a layer is caught for the context that asks, and for no other."""

import threading

import pytest
import torch
from torch import nn

from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.taps import Tapped, find_layers, listening, tapping, taps_of


class Layer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states + 1


class Decoder(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(hidden_states=x) if layer is self.layers[1] else layer(x)
        return x


def tap(decoder, taps, x):
    tapped = Tapped(decoder.layers, taps)
    with tapping(tapped), listening():
        decoder(x)
    return tapped


def test_what_enters_each_layer_is_stacked_in_the_order_of_the_taps():
    x = torch.zeros(2, 3, 5)
    states = tap(Decoder(), (0, 1, 3), x).stacked(x)
    assert states.shape == (2, 3, 3, 5)
    assert [states[:, :, place].unique().tolist() for place in range(3)] == [[0], [1], [3]]


def test_the_last_position_alone_is_that_of_all():
    x = torch.randn(2, 3, 5)
    tapped = tap(Decoder(), (0, 3), x)
    assert torch.equal(tapped.stacked(x, last_only=True), tapped.stacked(x)[:, -1:])


def test_no_hook_is_left_even_after_an_error():
    decoder = Decoder()
    with pytest.raises(ZeroDivisionError), tapping(Tapped(decoder.layers, (1, 2))), listening():
        assert [len(layer._forward_pre_hooks) for layer in decoder.layers] == [0, 1, 1, 0]
        raise ZeroDivisionError
    assert not any(layer._forward_pre_hooks for layer in decoder.layers)
    assert taps_of(decoder.layers) is None


def test_nobody_listens_where_nothing_is_asked():
    decoder = Decoder()
    with tapping(None), listening():
        assert not any(layer._forward_pre_hooks for layer in decoder.layers)


def test_an_inner_context_does_not_disturb_the_outer_one():
    decoder, x = Decoder(), torch.zeros(1, 1, 2)
    outer = Tapped(decoder.layers, (1,))
    with tapping(outer), listening():
        inner = tap(decoder, (2,), x)
        with tapping(None):
            decoder(x + 7)
        decoder(x)
    assert outer.stacked(x).unique().tolist() == [1]
    assert inner.stacked(x).unique().tolist() == [2]


def test_other_layers_of_the_context_are_not_asked():
    one, two = Decoder(), Decoder()
    with tapping(Tapped(one.layers, (0,))):
        assert taps_of(one.layers) is not None
        assert taps_of(two.layers) is None


def test_threads_that_tap_other_layers_at_once_see_their_own():
    decoder, both, results = Decoder(), threading.Barrier(2), {}

    def run(name, taps, value):
        tapped, x = Tapped(decoder.layers, taps), torch.full((1, 1, 1), value)
        with tapping(tapped), listening():
            both.wait()
            for _ in range(50):
                decoder(x)
            both.wait()
        results[name] = tapped.stacked(x).flatten().tolist()

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in (("first", (0, 2), 10.0), ("second", (0, 3), 100.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"first": [10.0, 12.0], "second": [100.0, 103.0]}
    assert not any(layer._forward_pre_hooks for layer in decoder.layers)


@pytest.mark.parametrize("taps", [(4,), (-1,), (0, 9)])
def test_a_layer_that_is_not_there_is_named(taps):
    with pytest.raises(ConfigError, match=r"taps must be numbers of decoder layers, 0 to 3, got"):
        Tapped(Decoder().layers, taps)


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (0, 2, 1, 2)])
def test_taps_that_do_not_rise_are_refused_with_what_to_give(taps):
    with pytest.raises(ConfigError, match="rise") as caught:
        Tapped(Decoder().layers, taps)
    assert f"give {tuple(sorted(set(taps)))}" in str(caught.value)


def test_one_layer_in_several_places_is_refused():
    with pytest.raises(UnsupportedError, match="Layer stands in several places"):
        Tapped(nn.ModuleList([Layer()] * 3), (0,))


def test_a_layer_that_is_not_called_is_named():
    decoder, x = Decoder(), torch.zeros(1, 2, 3)
    tapped = Tapped(decoder.layers, (0, 2))
    with tapping(tapped), listening():
        decoder.layers[0](x)
    with pytest.raises(UnsupportedError, match=r"Layer .* not so at taps \[2\]"):
        tapped.stacked(x)


def test_states_of_another_shape_are_refused():
    x = torch.zeros(4, 1, 2, 3)
    with pytest.raises(UnsupportedError, match=r"\[B, T, H\].* not so at taps \[1\]"):
        tap(Decoder(), (1,), x).stacked(x)


def test_the_list_of_the_layers_is_the_one_nearest_to_the_root():
    decoder = Decoder(2)
    decoder.layers[0].experts = nn.ModuleList(Layer() for _ in range(2))
    assert find_layers(decoder, 2) is decoder.layers
    outer = nn.Module()
    outer.inner, outer.others = decoder, nn.ModuleList([Layer()])
    assert find_layers(outer, 2) is decoder.layers


@pytest.mark.parametrize(("count", "found"), [(3, "found none"), (None, "found none"), (2, "found 2")])
def test_layers_that_cannot_be_told_are_an_error_that_says_what_was_looked_for(count, found):
    decoder = Decoder(2)
    decoder.others = nn.ModuleList(Layer() for _ in range(2))
    with pytest.raises(UnsupportedError, match=f"Decoder: .* num_hidden_layers = {count} .* {found}"):
        find_layers(decoder, count)
