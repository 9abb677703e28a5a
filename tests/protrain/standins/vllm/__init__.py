"""What TRL imports of vLLM, where that is not installed: for the protocol of weights alone."""

__version__ = "0.22.0"


class LLM:
    """Stands for an engine in the trainer's process, which no test has."""


class RequestOutput:
    """Stands for its answers."""


class SamplingParams:
    """Stands for its settings."""
