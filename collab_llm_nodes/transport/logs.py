"""A server's log lines: text for people, or one JSON object each for collectors."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from types import TracebackType
from typing import Any

from collab_llm_nodes.errors import printable

QUIET = "NONE"
"""GRPC_VERBOSITY for a server.

gRPC's core writes to standard error itself, in no format of ours, and quotes messages of clients,
line breaks included, before they have shown a token.
"""
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def set_up_logging(log_format: str) -> None:
    """Log to standard error from ``INFO`` up; ``log_format`` is "text" or "json"."""
    handler = _StandardError()
    handler.setFormatter(_Json() if log_format == "json" else Text())
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_ours)


def is_set_up() -> bool:
    """Return True in a server's process, whose output consists of log lines."""
    return any(isinstance(handler, _StandardError) for handler in logging.getLogger().handlers)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for the tracebacks about metadata that is no UTF-8: strangers cause them."""
    return not str(record.msg).startswith("Invalid encoding on")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields given in ``extra``, without Ray's own, which begin with an underscore."""
    return {k: v for k, v in vars(record).items() if k not in _KNOWN and k[0] != "_"}


class _StandardError(logging.Handler):
    """Writes to the present ``sys.stderr``: the original one may have been closed.

    A line and its end are one write. With PYTHONUNBUFFERED, as in many containers, ``print`` makes
    two, and another process's output may come between them.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as in logging's own handlers: work goes on
            self.handleError(record)


class Text(logging.Formatter):
    """Lines for people; no text of a stranger begins one of them."""

    def __init__(self, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
        super().__init__(form)

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {k}={v}" for k, v in _facts(record).items())
        return printable(super().formatMessage(record) + facts)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """Indent all lines, because an exception may quote a stranger's text."""
        return textwrap.indent(printable(super().formatException(ei), lines=True), "  ")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
