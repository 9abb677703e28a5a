"""Models without weights: built from a YAML, fed with a made-up batch, run on meta."""
