"""One draft: a shape with a token at every node. Knows ids, not where they come from."""

from dataclasses import dataclass

from medusa_spec.tree.shape import TreeShape, chain, shape_of


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """A draft ready to be verified.

    ```
    tokens (17, 5, 7, 9)       17 ─ 5 ─ 7        17 was chosen by the target; 5, 7 and 9 are guesses
                               └─── 9
    ```

    Attributes:
        shape: Who is whose child.
        tokens: A token id per node; the first is the root, which the target has already chosen.

    Raises:
        ValueError: If the number of tokens is not the number of nodes.
    """

    shape: TreeShape
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != self.shape.size:
            raise ValueError(
                f"tokens must have one id per node: the shape has {self.shape.size} nodes, got {len(self.tokens)} ids"
            )

    @property
    def size(self) -> int:
        """N, the number of nodes with the root."""
        return self.shape.size

    def child_with(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, or None: in the drawing `child_with(0, 9)` is 3."""
        for child in self.shape.children[node]:
            if self.tokens[child] == token:
                return child
        return None

    def cut(self, depth: int) -> "TokenTree":
        """The same draft without nodes deeper than `depth`: in the drawing `cut(1)` leaves 17, 5 and 9."""
        if depth >= self.shape.max_depth:
            return self
        kept = [node for node, own in enumerate(self.shape.depths) if own <= depth]
        place = {node: index for index, node in enumerate(kept)}
        parents = (-1, *(place[self.shape.parents[node]] for node in kept[1:]))
        return TokenTree(shape=shape_of(parents), tokens=tuple(self.tokens[node] for node in kept))

    @classmethod
    def root_only(cls, token: int) -> "TokenTree":
        """A tree of one node: plain decoding."""
        return cls(shape=chain(0), tokens=(token,))
