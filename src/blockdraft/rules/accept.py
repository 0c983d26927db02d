"""Which candidates stand. Lossless by construction; no model in sight."""

from collections.abc import Callable, Sequence

from torch import Tensor

from blockdraft.rules.sampling import double, draw


def follow(tokens: Sequence[int], parents: Sequence[int] | None, choose: Callable[[int, list[int]], int]) -> tuple[list[int], int]:
    """Walk from the anchor while the target's own choice names a child (trees: arXiv 2604.12989).

    Exact for greedy and for sampled choices: every emitted token is the target's choice under the true prefix; the draft
    only decides how far one pass reaches.

    Args:
        tokens: candidate ``i`` is node ``i + 1``; node 0 is the anchor.
        parents: the parent node of each candidate; None: a chain.
        choose: ``(node, tokens of the path behind the anchor) -> the target's token`` after that node.

    Returns:
        The nodes of the path, 0 first, and the bonus token: the first choice that no child holds.
    """
    children: dict[tuple[int, int], int] = {}
    for i, token in enumerate(tokens):
        children.setdefault((i if parents is None else parents[i], token), i + 1)
    node, path, emitted = 0, [0], []  # type: ignore[var-annotated]
    while True:
        choice = choose(node, emitted)
        child = children.get((node, choice))
        if child is None:
            return path, choice
        node = child
        path.append(node)
        emitted.append(choice)


def reject(
    tokens: Sequence[int],
    draft_laws: Tensor,
    target_law: Callable[[int, list[int]], Tensor],
    accept_uniform: Callable[[int], float],
    residual_uniform: Callable[[int], float],
) -> tuple[list[int], int]:
    """Speculative sampling of a chain (arXiv 2211.17192): accept d iff u * q(d) < p(d), else draw from (p - q)+.

    Args:
        tokens: the chain's candidates, candidate ``i`` drawn from ``draft_laws[i]``.
        draft_laws: ``[candidates, vocabulary]``.
        target_law: ``(node, tokens of the path) -> p [vocabulary]``.
        accept_uniform, residual_uniform: noise for the i-th token behind the anchor.

    Returns:
        As ``follow``.
    """
    path: list[int] = [0]
    for i, token in enumerate(tokens):
        p, q = target_law(i, list(tokens[:i])), draft_laws[i]
        if accept_uniform(i) * float(q[token]) < float(p[token]):
            path.append(i + 1)
            continue
        return path, draw(residual(p, q), residual_uniform(i))
    return path, draw(target_law(len(tokens), list(tokens)), residual_uniform(len(tokens)))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``max(p - q, 0)``, or p itself where rounding leaves nothing of it (p and q agree to the last bit)."""
    rest = (double(p) - double(q)).clamp_min(0.0)
    return rest if bool(rest.sum() > 0) else double(p)
