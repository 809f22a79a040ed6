"""Events of a trace, made up."""

from __future__ import annotations


def on_gpu(name: str, stream: int, start: float, end: float, category: str = "kernel") -> dict:
    """A record as the profiler writes them."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": 77}
    times = {"ts": start, "dur": end - start}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        **times,
        "args": args,
    }
