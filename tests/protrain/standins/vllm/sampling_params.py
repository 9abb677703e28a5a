"""See `vllm`."""


class StructuredOutputsParams:
    """Stands for grammars of answers."""
