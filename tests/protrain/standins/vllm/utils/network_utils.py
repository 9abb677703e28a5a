"""See `vllm`."""


def get_ip() -> str:
    """Where a server finds the trainer."""
    return "127.0.0.1"
