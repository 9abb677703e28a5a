"""One base in memory, many adapters: a training service, in process or over HTTP.

`turns`, `losses` and `adapters` know no model; `base` opens one; `live` shows an adapter in
it; `passes` are its micro-batches; `engine` makes the steps; `messages` (protobuf), `requests`
and `http` are Tinker's protocol.
"""
