"""Compressed gradient communication between ranks: codecs, all-reduce, comm hooks, error feedback.

`qsync_fx.distributed.compress` attaches it to a model and returns a `CompressorHandle`. Start with
`ddp_hook` (DistributedDataParallel), `fsdp_hook` (FSDP2) or `duo/` (DUO); `aqgb` is AQGB. They send
buckets (`bucket`) as bytes of a `codecs.Codec`; `allreduce.Reducer` averages them. For the speed
and cost of codecs see `codec_benchmarks` and `codec_cost_model`.
"""
