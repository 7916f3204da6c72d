"""Compressed gradient communication between ranks: codecs, all-reduce, comm hooks, error feedback.

`qsync_fx.distributed.compress` attaches it to a model and returns a `CompressorHandle`. Start with
`ddp_hook` (DistributedDataParallel), `fsdp_hook` (FSDP2) or `duo/` (DUO); AQGB is in `aqgb/`.
All of them send buckets (`bucket`) as bytes of a `codecs.Codec`, and `allreduce.Reducer` averages
them over `point_to_point` messages. `codec_benchmarks` measures codecs and reductions,
`codec_cost_model` predicts their cost.
"""
