"""Compressed gradient communication between ranks: codecs, all-reduce, comm hooks, error feedback.

Start with `ddp_hook` (DistributedDataParallel), `fsdp_hook` (FSDP2) or `duo/` (DUO); `aqgb` is
AQGB. They send buckets (`bucket`) as bytes of a `codecs.Codec`; `allreduce.Reducer` averages them.
"""
