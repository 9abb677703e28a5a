from .blueprint import _autocast_dtype as autocast_dtype, _batch as sample_batch
