"""One base in memory, many adapters: a training service, in process or over HTTP.

`turns`, `losses` and `adapters` know no model; `live` shows an adapter in one; `engine`
opens the base and makes the steps; `messages` and `http` are Tinker's protocol.
"""
