"""Plans as files of other training tools: torch, torchtitan, Megatron-LM and DeepSpeed."""
