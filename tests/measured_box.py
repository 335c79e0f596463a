"""A made-up calibration, so that tests of predictions and comparisons need no minutes of measuring."""

from __future__ import annotations

from roofline.hardware import Figure, Hardware


def box(
    *, flops_per_s: float = 1e12, bytes_per_s: float = 1e12, launch_s: float = 1e-7, dispatch_s: float = 1e-5
) -> Hardware:
    """A machine whose every product runs at one rate and every elementwise op at another."""

    def figure(value: float, unit: str) -> Figure:
        return Figure(value, unit, "measured here", "a test", "2026-01-01")

    shapes = ((1024, 1024), (65536, 1024))
    return Hardware(
        id="here",
        name="a box",
        vendor="nobody",
        architecture="cpu",
        figures={
            "peak_bandwidth_bytes_per_s": figure(bytes_per_s, "B/s"),
            "peak_flops_per_s.float32": figure(flops_per_s, "FLOP/s"),
            "memory_bytes": figure(2**34, "B"),
        },
        measured={
            "environment": {"device": "a box", "platform": "cpu", "jaxlib": "0", "date": "2026-01-01T00:00:00+00:00"},
            "dtype": "float32",
            "products": {
                "float32": [
                    {"rows": rows, "columns": columns, "summands": summands, "flops_per_s": flops_per_s}
                    for columns, summands in shapes
                    for rows in (1, 64)
                ]
            },
            "attention": [
                {"heads": heads, "context": context, "group": 2, "tokens": tokens, "flops_per_s": flops_per_s}
                for heads in (8, 64)
                for context in (128, 2048)
                for tokens in (1, context)
            ],
            "experts": [
                {"block": block, "rows": rows, "flops_per_s": flops_per_s}
                for block, rows in ((1, 4), (1, 16), (8, 256), (64, 4096))
            ],
            "elementwise": dict.fromkeys(("norm", "rope", "swiglu", "residual"), bytes_per_s),
            "launch_s": launch_s,
            "dispatch_s": dispatch_s,
        },
    )
