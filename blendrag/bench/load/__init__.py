"""Blending in traffic: the same seeded requests against vLLM with prefix caching, blended and plain.

`workload` says which documents each request has and when it comes, `prompts` makes texts of it, a `Client` sends them
(`engine_client`, `http_client`), `run` keeps to the schedule, `figures` are what comes out, and `report` and `page`
show them.  `turns` measures conversations, turn by turn.
"""
