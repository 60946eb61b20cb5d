"""The web application: every route of the server on one Quart app, created from a request desk.

`make_app` is called by the command line, and by tests with a fake desk. The app knows the actors only through the desk
that it is given.
"""

from __future__ import annotations

import sys
from types import TracebackType

import structlog
from quart import Response, request
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioRequest

from quipu.actors.request_desk.interface import Desk
from quipu.actors.response_store.response_store import ResponseStore

from .api.admin.adapter_routes import install_adapter_routes
from .api.admin.engines import install_engines
from .api.admin.organization_usage import install_organization_usage
from .api.admin.peer_probes import install_peer_probes
from .api.admin.prices import PriceList
from .api.admin.routes import install_admin
from .api.admin.usage_record import install_usage_record
from .api.admin.usage_source import UsageSource
from .api.anthropic.message_batches import install_message_batches
from .api.anthropic.routes import install_anthropic
from .api.bodies import BodyBudget, MeteredHTTP, MeteredRequest
from .api.cache.explain import install_explain
from .api.cache.lookup import install_lookup
from .api.cache.stats import install_cache_stats
from .api.cache.tree import install_cache_tree
from .api.llamacpp.llama_routes import install_llama
from .api.models import install_models
from .api.openai.background_runs import BackgroundRuns
from .api.openai.batches import install_batches
from .api.openai.conversation_routes import install_conversations
from .api.openai.files import install_files
from .api.openai.pooled_routes import install_pooled
from .api.openai.responses_routes import ResponseReader, install_responses
from .api.openai.routes import install_openai
from .api.openai.store_door import StoreDoor
from .api.openai.stored_chats import install_stored_chats
from .api.openai.stored_response_routes import install_stored_responses
from .api.openai.tokenize import install_tokenize
from .api.openapi.document_route import install_document
from .api.sglang.generate_routes import install_generate
from .auth.auth import install_auth
from .auth.browsers import install_browser_rules
from .auth.keys import KeyStore
from .batches.batch_service import BatchService
from .http.paths import SentPathMap
from .options import AppOptions
from .request.error_handlers import install_error_handlers
from .request.errors import respond, unavailable
from .request.request_context import current_request_context, install_request_contexts
from .telemetry.answer_counts import PROBES, AnswerCounts
from .telemetry.logs import frames_of
from .telemetry.tracing import Tracer
from .ui.routes import install_root, install_ui


class QuipuApp(QuartTrio):
    """A Quart app whose requests own a scope, and whose log never has the contents of requests."""

    asgi_http_class = MeteredHTTP
    request_class: type[TrioRequest] = MeteredRequest
    url_map_class = SentPathMap

    def __init__(self, bodies: BodyBudget) -> None:
        super().__init__("quipu", static_folder=None)
        self.bodies = bodies
        self.answers = AnswerCounts()

    def log_exception(
        self, exception_info: tuple[type, BaseException, TracebackType] | tuple[None, None, None]
    ) -> None:
        """Log an error raised outside of handlers, without its message, which the stock method would quote."""
        error = exception_info[1] or sys.exception()
        if error is not None:
            log = structlog.get_logger("quipu.web")
            log.error("request.crashed", error_type=type(error).__name__, frames=frames_of(error))


def make_app(
    desk: Desk,
    options: AppOptions | None = None,
    keys: KeyStore | None = None,
    tracer: Tracer | None = None,
    usage: UsageSource | None = None,
    prices: PriceList | None = None,
    store: ResponseStore | None = None,
    batches: BatchService | None = None,
) -> QuipuApp:
    """Return the application that serves `desk` to holders of one of `keys`, or to everybody if there are none.

    Without a `usage` source there are no usage reports, without `prices` they show no cost, and without a `store` no
    response is stored. `batches` runs batches with the application.
    """
    options = options or AppOptions()
    keys = KeyStore() if keys is None else keys
    app = QuipuApp(BodyBudget(options.max_body_memory_bytes))
    app.config.update(
        # Quart's default would cut off every stream that lasts longer than a minute.
        RESPONSE_TIMEOUT=None,
        BODY_TIMEOUT=options.body_timeout_s,
        MAX_CONTENT_LENGTH=options.max_body_bytes,
    )
    install_request_contexts(app, desk, tracer or Tracer(), app.answers)
    install_reserved_connections(app)
    install_browser_rules(app, options.browsers)
    # Authentication comes before every hook that reads or opens something.
    install_auth(app, keys, options.domain, open_admin=options.open_admin)
    install_error_handlers(app)
    door = None if store is None else StoreDoor(store)
    install_openai(app, desk, options, door)
    install_responses_api(app, desk, options, door)
    install_stored_chats(app, door)
    install_tokenize(app, desk, options)
    install_generate(app, desk, options)
    install_llama(app, desk, options)
    install_pooled(app, desk, options)
    install_anthropic(app, desk, options)
    if batches is not None:
        install_files(app, batches)
        install_batches(app, batches)
        install_message_batches(app, batches)
    install_lookup(app, desk, options, ResponseReader(door).read)
    install_models(app, desk)
    install_admin(app, desk, keys, options)
    install_engines(app, desk)
    install_peer_probes(app, desk, options)
    install_adapter_routes(app, desk, options)
    install_cache_stats(app, desk)
    install_explain(app, desk, usage)
    install_cache_tree(app, desk)
    if usage is not None:
        install_organization_usage(app, usage)
        install_usage_record(app, usage)
    install_root(app, serves_ui=options.serves_ui)
    if options.serves_ui:
        install_ui(app, keys, usage, prices, open_admin=options.open_admin)
    install_document(app)
    return app


def install_responses_api(app: QuipuApp, desk: Desk, options: AppOptions, door: StoreDoor | None) -> None:
    """Register everything below `/v1/responses` and `/v1/conversations`."""
    runs = BackgroundRuns(0 if door is None else door.store.config.max_background)
    if door is not None:
        door.store.num_running = runs.__len__
    install_responses(app, desk, options, ResponseReader(door, runs))
    install_stored_responses(app, options, door, runs)
    install_conversations(app, door, options.seal, lambda: desk.info.images)


def install_reserved_connections(app: QuipuApp) -> None:
    """Refuse everything but probes on connections beyond the limit."""

    @app.before_request
    async def refuse_if_reserved() -> Response | None:
        connection, rule = current_request_context().connection, request.url_rule
        if connection is None or not connection.is_reserved or (rule is not None and rule.rule in PROBES):
            return None
        response = respond(unavailable("The server is overloaded: too many connections. Try again later."))
        response.headers["Connection"] = "close"
        return response
