"""What a run will do and what it did: for people in `text` and `page`, for programs in
`forecast` and `run`.
"""
