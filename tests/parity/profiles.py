"""The run profiles that the original's authors published, as command lines."""

MUON = "--optimizer muon --muon-target attn --muon-polar-steps 3 --muon-row-split-size 64"
ALL_BFLOAT16 = (
    "--activation-dtype bfloat16 --param-dtype bfloat16 --opt-state-dtype bfloat16 --opt-update-dtype bfloat16 "
    "--rope-dtype bfloat16 --ffn-mul-dtype bfloat16 --attention-logits-dtype bfloat16"
)
PROFILES = {
    "single_chip": f"--pos-len 19 --model-kind b24c1024 {MUON} {ALL_BFLOAT16} --donate-train-buffers",
    "eight_chips": f"--pos-len 19 --model-kind b40c768 --batch-size 512 --ema-decay 0.999 {MUON} --data-parallel --data-parallel-devices 8",
}
