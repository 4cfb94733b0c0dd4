"""What the tests of measuring share: a clock, a backend whose stages say what a test wants."""

from ds4py.contracts import Health, StageStatus
from ds4py.layer_range import LayerRange
from ds4py.server.observability.console_stats import Watched
from ds4py.server.observability.request_metrics import RequestMetrics
from tests.support.fakes import FakeBackend

CHAT = "/v1/chat/completions"

STAGES = (
    StageStatus(
        name="coordinator",
        layers=LayerRange(0, 1),
        weight_bytes=900,
        prefill_tokens=512,
        prefill_usec=1_000_000,
        prefill_wait_usec=700_000,
        decode_tokens=10,
        decode_usec=500_000,
        decode_wait_usec=40_000,
        busy_usec=1_400_000,
        kv_bytes=300,
        kv_budget_bytes=1000,
    ),
    StageStatus(
        name="10.0.0.3:8002",
        layers=LayerRange(2, 3, has_output=True),
        prefill_tokens=500,
        prefill_usec=250_000,
        prefill_hop_usec=30_000,
        decode_tokens=10,
        decode_usec=20_000,
        decode_hop_usec=15_000,
        busy_usec=270_000,
        input_bytes=7000,
        output_bytes=3000,
    ),
)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Backend(FakeBackend):
    """A fake backend with a health that a test sets."""

    def __init__(self, stages: tuple[StageStatus, ...] = STAGES, **options) -> None:
        super().__init__(**options)
        self.state = Health(ready=True, missing="", stages=stages, replays=2, route_changes=3)

    def health(self) -> Health:
        return self.state


def watched(
    backend: FakeBackend | None = None,
    meter: RequestMetrics | None = None,
    *,
    load=(1, 2),
    n_sessions=4,
) -> Watched:
    return Watched(
        backend=backend or Backend(),
        meter=meter or RequestMetrics(Clock()),
        load=lambda: load,
        n_sessions=n_sessions,
        name="toy",
    )


def one_request(meter: RequestMetrics, *, n_tokens: int = 3, clock: Clock | None = None) -> None:
    """Let a request run from its arrival to its end."""
    request = meter.accepted(CHAT)
    request.queued()
    with request.leased():
        request.prefilled(100, 30)
        for n in range(n_tokens):
            if clock is not None:
                clock.pass_(0.1)
            request.token(reasoning=n == 0)
    request.finished("stop")
