"""Shapes of a draft: pure tensor and tuple maths, no models."""

from medusa_spec.tree.candidates import Candidates as Candidates
from medusa_spec.tree.growth import Growing as Growing
from medusa_spec.tree.growth import Growth as Growth
from medusa_spec.tree.mask import ancestor_mask as ancestor_mask
from medusa_spec.tree.prices import Prices as Prices
from medusa_spec.tree.prices import interpolate as interpolate
from medusa_spec.tree.product_tree import open_product as open_product
from medusa_spec.tree.search import best_tree as best_tree
from medusa_spec.tree.search import expected_accepted as expected_accepted
from medusa_spec.tree.search import nested_order as nested_order
from medusa_spec.tree.shape import TreeShape as TreeShape
from medusa_spec.tree.shape import chain as chain
from medusa_spec.tree.shape import merge_chains as merge_chains
from medusa_spec.tree.shape import shape_of as shape_of
from medusa_spec.tree.template import TreeTemplate as TreeTemplate
from medusa_spec.tree.template import chain_template as chain_template
from medusa_spec.tree.token_tree import TokenTree as TokenTree
from medusa_spec.tree.trust import Trust as Trust
from medusa_spec.tree.values import PathValues as PathValues
from medusa_spec.tree.values import count_paths as count_paths

__all__ = [
    "Candidates",
    "Growing",
    "Growth",
    "PathValues",
    "Prices",
    "TokenTree",
    "TreeShape",
    "TreeTemplate",
    "Trust",
    "ancestor_mask",
    "best_tree",
    "chain",
    "chain_template",
    "count_paths",
    "expected_accepted",
    "interpolate",
    "merge_chains",
    "nested_order",
    "open_product",
    "shape_of",
]
