"""From tensors to a running kernel: checks, padding, arguments (`launch`; `quantizing` and `converting` for the other two kinds).

`device` is what is known of a device, `calls` what every call needs, and `reasons` keeps why torch computed instead. `event_timer` measures
kernels against `peers`.
"""
