"""What a writer hands over shares no memory with the heads."""

import torch

from medusa_spec.formats.exported import plain


def test_a_plain_tensor_is_a_whole_copy() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    part = weight.T[1:]
    found = plain(part)
    assert torch.equal(found, part) and found.is_contiguous() and not found.requires_grad
    found.zero_()
    assert weight[0, 2] == 2.0
