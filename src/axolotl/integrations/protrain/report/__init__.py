"""Forecasts and reports of a run: for people in `text` and `page`, for programs in
`forecast` and `run`."""
