"""Which engines a prompt goes to: the router's own choice, among simulated engines.

Used by `timed_cluster.py`, in the place of `actors/router/dispatch.py` and `actors/router/paired_prompts.py`, which do
the same with messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quipu.actors.channel import Channel
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.request_desk.engine_pool import EngineMessage
from quipu.actors.router.pairs import PairPolicy, stays
from quipu.actors.router.route_store import ReadyEngine
from quipu.actors.router.routing import Route, Routing


@attrs.frozen
class Pair:
    first: Route
    """Where the prompt is computed, unless it is cached there."""
    then: Route | None
    """Where it continues after its first token. None: it stays."""


class PairChoice:
    def __init__(self, routing: Routing, roles: Sequence[EngineRole], local_tokens: int) -> None:
        """`roles`: by slot."""
        self._routing = routing
        self._policy = PairPolicy(routing, local_tokens)
        queue: Channel[EngineMessage] = Channel(1)  # nothing is put into it
        self._engines = [ReadyEngine(slot, 1, slot, "", queue, role) for slot, role in enumerate(roles)]

    def choose(self, keys: Sequence[bytes], num_tokens: int, *, continues: bool) -> Pair:
        """Choose engines for a prompt, and note that it is sent there."""
        plan = self._policy.plan(self._engines, keys, num_tokens, continues=continues)
        first = self._routing.route(keys, num_tokens, slots=plan.slots)
        if plan.decode is None or stays(self._engines[first.slot], plan.decode):
            return Pair(first, None)
        slot = plan.decode.slot
        then = self._routing.follow(slot, num_tokens)
        self._routing.on_first_token(then)  # it is going to run there
        then.sent = self._routing.sent.add(slot, keys) if keys else None
        return Pair(first, then)
