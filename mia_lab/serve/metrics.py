"""Prometheus metrics, beside vLLM's own on /metrics, with one API server process or several."""
from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from .catalogue import Catalogue
from .noting import Noted
from .refusing import Refused


class Metrics:
    """The families that start with mia_lab_. What the worker counts for all processes is reported by one of them."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._requests = Counter("mia_lab_requests_total", "Requests that an edit acted on.", ["edit"])
        self._active = Gauge("mia_lab_active_edits", "Running requests that an edit acts on.", ["edit"], multiprocess_mode="livesum")
        self._dose = Histogram("mia_lab_dose", "Largest dose of a request at one point, in mean residual norms.",
                               buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 4))
        self._capturing = Counter("mia_lab_capturing_requests", "Requests that rows are captured from.")
        self._calls = Counter("mia_lab_calls", "Calls of notebook clients, which read and compute on what they captured.", ["method"])
        self._rows = Counter("mia_lab_captured_rows", "Rows captured.")
        self._dropped = Counter("mia_lab_dropped_rows", "Rows dropped, where delivery is best effort.")
        self._held = Gauge("mia_lab_held_capture_bytes", "Bytes of captures held or reserved.", multiprocess_mode="mostrecent")
        self._gates = Counter("mia_lab_gate_decisions", "Gates of finished requests, by what they decided.", ["decision"])
        self._refusals = Counter("mia_lab_refusals", "Requests refused.", ["status"])
        self._config = Gauge("mia_lab_config_info", "Processes that serve a catalogue.", ["digest"], multiprocess_mode="livesum")
        self._bundles = Gauge("mia_lab_bundles", "Bundles in the folder.", ["state"], multiprocess_mode="mostrecent")
        self._digest = ""
        self._counted: dict[str, int] = {}

    def began(self, what: Noted) -> None:
        """A request starts to run."""
        for name in what.edits:
            self._requests.labels(name).inc()
            self._active.labels(name).inc()
        if what.dose:
            self._dose.observe(what.dose)
        if what.captures:
            self._capturing.inc()

    def ended(self, what: Noted) -> None:
        """A request is over, however it ended."""
        for name in what.edits:
            self._active.labels(name).dec()

    def called(self, method: str) -> None:
        """A notebook client calls one of `calls.METHODS`."""
        self._calls.labels(method).inc()

    def refused(self, refusal: Refused) -> None:
        """A request was refused."""
        self._refusals.labels(str(refusal.status)).inc()

    def adopted(self, catalogue: Catalogue) -> None:
        """This process serves another catalogue from now on."""
        if self._digest:
            self._config.labels(self._digest).set(0)
        self._digest = catalogue.digest
        self._config.labels(self._digest).set(1)
        self._bundles.labels("served").set(len(catalogue.bundles))
        self._bundles.labels("quarantined").set(len(catalogue.quarantined))

    def beat(self, state: Mapping[str, Any], leads: bool) -> None:
        """What the worker counted since it started; only who leads adds it up."""
        opened, closed = state["gates"]
        totals = {"rows": state["rows"], "dropped": state["dropped"], "opened": opened, "closed": closed}
        grown = {name: total - self._counted.get(name, 0) for name, total in totals.items()}
        first, self._counted = not self._counted, totals
        if leads and not first:
            self._rows.inc(grown["rows"])
            self._dropped.inc(grown["dropped"])
            self._gates.labels("opened").inc(grown["opened"])
            self._gates.labels("closed").inc(grown["closed"])
            self._held.set(state["held"][1])


@cache
def metrics() -> Metrics:
    """This process's metrics; a registry takes each family once."""
    return Metrics()
