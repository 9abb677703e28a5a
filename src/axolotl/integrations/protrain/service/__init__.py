"""One base in memory, many adapters: a training service, in process or over HTTP.

`turns`, `losses` and `adapters` know no model; `base` opens one; `live` shows an adapter in
it; `optimizers` update one; `passes` are its micro-batches; `engine` makes the steps;
`messages` (protobuf), `requests` and `http` are Tinker's protocol; `rest` and `rest_sessions`
tell what there is, in `states` and `client_sessions`. `full` trains all of the base instead,
and `full_states` writes it.

Samples: `sampling` chooses tokens (`answers` are what comes of it), `decoding` makes their
logits, `samples` has the rows that wait and their turns, `sessions` the weights that they are
made with, `sampler` checks what clients ask; `sample_requests` is Tinker's protocol and
`completions` OpenAI's, with `text`.
"""
