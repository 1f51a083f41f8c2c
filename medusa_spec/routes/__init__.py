"""The ways in which a target checks a tree: by its attention interface, by masks, by rows of a batch."""

from medusa_spec.routes.attention import AttentionRoute
from medusa_spec.routes.base import Route
from medusa_spec.routes.levels import LevelsRoute, NodesRoute
from medusa_spec.routes.mask import MaskRoute
from medusa_spec.routes.paths import PathsRoute

ROUTES: tuple[type[Route], ...] = (AttentionRoute, MaskRoute, PathsRoute, LevelsRoute, NodesRoute)
"""In the order in which they are tried: the fastest first."""

__all__ = ["ROUTES", "AttentionRoute", "LevelsRoute", "MaskRoute", "NodesRoute", "PathsRoute", "Route"]
