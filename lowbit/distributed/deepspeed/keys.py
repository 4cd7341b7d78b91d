"""The keys of DeepSpeed configurations, with their translations.

Source: DeepSpeed Configuration JSON, https://www.deepspeed.ai/docs/config-json/, as of DeepSpeed 0.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lowbit import optim
from lowbit.distributed.deepspeed.batch_sizes import (
    MICRO_BATCHES,
    PROCESSES,
    SAMPLES,
    TOTAL,
    missing_factors,
    with_quotient,
)
from lowbit.distributed.deepspeed.result import SCHEDULES, FromDeepSpeed
from lowbit.distributed.strategies import STRATEGIES
from lowbit.name_tables import did_you_mean

__all__ = ["AUTO", "KEYS", "Key", "priority"]

#: The value of keys that the Trainer of transformers fills in.
AUTO = "auto"
#: The sharding strategy of each stage of ``zero_optimization``.
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2-replicated", 3: "zero3"}


def _number(key: str, value: Any, least: float = 0) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ValueError(f"from_deepspeed: {key} must be a number from {least:g}, got {value!r}")
    return value


#: A function of the translation, the value of a key, and all values; it returns the reason if it has no counterpart.
Translate = Callable[[FromDeepSpeed, Any, Mapping[str, Any]], str | None]


class Key(NamedTuple):
    """A key of a DeepSpeed configuration. ``about``: its counterpart, for the documents."""

    about: str
    translate: Translate


def _without(reason: str) -> Key:
    """A key without a counterpart, for values that switch something on."""
    return Key(reason, lambda translation, value, values: reason if value not in (False, None, 0, "none") else None)


def _always(reason: str) -> Key:
    """A key whose true value is lowbit's only behaviour."""
    return Key(
        f"{reason}; False has no counterpart",
        lambda translation, value, values: None if value else f"{reason}; it cannot be switched off",
    )


def _same(about: str) -> Key:
    """A key whose value does not matter."""
    return Key(about, lambda translation, value, values: None)


def priority(key: str) -> int:
    """The stage comes first, because other keys depend on it; then precision, optimizer and buckets; then sizes."""
    order = (
        "zero_optimization.stage", "bf16.enabled", "fp16.enabled", "optimizer.type", "optimizer.params",
        "zero_optimization.reduce_bucket_size", SAMPLES, MICRO_BATCHES, TOTAL,
    )  # fmt: skip
    return order.index(key) if key in order else len(order)


# -- keys -------------------------------------------------------------------------------------------------------------
def _stage(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or value not in _STAGES:
        raise ValueError(f"from_deepspeed: zero_optimization.stage must be one of 0, 1, 2, 3, got {value!r}")
    translation.strategy = _STAGES[value]


def _bf16(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> None:
    if value:
        translation.precision = "bf16"
        if STRATEGIES[translation.strategy].parameters:
            translation.shard["precision"] = torch.bfloat16


def _fp16(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> None:
    if not value:
        return
    if values.get("bf16.enabled") is True:
        raise ValueError("from_deepspeed: bf16 and fp16 are both enabled; DeepSpeed takes one of them")
    translation.precision = "fp16"
    translation.scaler["init_scale"] = 2.0 ** _number(
        "fp16.initial_scale_power", values.get("fp16.initial_scale_power", 16)
    )
    if _number("fp16.loss_scale", values.get("fp16.loss_scale", 0)):
        translation.scaler["init_scale"] = float(values["fp16.loss_scale"])
        translation.notes["fp16.loss_scale"] = "a start value; lb.train.LossScaler always adapts the scale"
    window = values.get("fp16.loss_scale_window", 1000)
    translation.scaler["growth_interval"] = int(_number("fp16.loss_scale_window", window, 1))


class _Optimizer(NamedTuple):
    """A class, and DeepSpeed's names of its arguments; they are the same unless given."""

    make: type[torch.optim.Optimizer]
    fixed: Mapping[str, Any]
    names: tuple[str, ...]


_ADAM = ("lr", "betas", "eps", "weight_decay")
_OPTIMIZERS = {
    "adamw": _Optimizer(optim.AdamW, {"bits": 32}, _ADAM),
    "adam": _Optimizer(torch.optim.Adam, {}, (*_ADAM, "amsgrad")),
    "lion": _Optimizer(optim.Lion, {"bits": 32}, ("lr", "betas", "weight_decay")),
    "muon": _Optimizer(optim.Muon, {"bits": 32}, ("lr", "momentum", "weight_decay")),
    "sgd": _Optimizer(torch.optim.SGD, {}, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "adagrad": _Optimizer(torch.optim.Adagrad, {}, ("lr", "eps", "weight_decay", "lr_decay")),
}
#: Arguments without an effect on the result.
_IGNORED = (
    "torch_adam",
    "fused",
    "adam_w_mode",
    "bias_correction",
    "set_grad_none",
    "adamw_mode",
    "fp32_optimizer_states",
)


def _optimizer(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    name, params = str(value).lower(), dict(values.get("optimizer.params") or {})
    if name == "adam" and params.get("adam_w_mode", True):
        name = "adamw"  # as DeepSpeed does
    row = _OPTIMIZERS.get(name)
    if row is None:
        return f"lowbit has no such optimizer; near are {', '.join(_OPTIMIZERS)}, and lb.optim.Adafactor"
    auto = [key for key, value in params.items() if value == AUTO]
    translation.auto += tuple(f"optimizer.params.{key}" for key in auto)
    for key in params:
        if key not in (*row.names, *_IGNORED, *auto):
            translation.unsupported[f"optimizer.params.{key}"] = f"{row.make.__name__} has no such argument"
    options = {key: params[key] for key in row.names if key in params and key not in auto}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if "weight_decay" not in params and row.make is optim.AdamW:
        options["weight_decay"] = 0.0  # DeepSpeed's default
    translation.optimizer = row.make, {**options, **row.fixed}
    return None


def _scheduler(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    params = dict(values.get("scheduler.params") or {})
    if value not in SCHEDULES:
        return _OTHER_SCHEDULES.get(str(value), f"unknown scheduler{did_you_mean(str(value), SCHEDULES)}")
    auto = [key for key, value in params.items() if value == AUTO]
    translation.auto += tuple(f"scheduler.params.{key}" for key in auto)
    if auto:
        return f"its {', '.join(auto)} are decided by the Trainer; give numbers"
    missing = [key for key in ("total_num_steps",) if value == "WarmupDecayLR" and key not in params]
    if missing:
        raise ValueError(f"from_deepspeed: scheduler WarmupDecayLR needs params.{missing[0]}")
    known = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps")
    for key in [key for key in params if key not in known]:
        translation.unsupported[f"scheduler.params.{key}"] = "the schedule has no such argument"
        del params[key]
    translation.scheduler = value, params
    return None


def _batch(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    """``train_batch_size`` gives the factor that the configuration leaves out."""
    if value is None:
        return None
    keys = (SAMPLES, MICRO_BATCHES)
    auto = [key for key in keys if key in translation.auto]
    if auto:
        return f"the Trainer decides {' and '.join(auto)}; give numbers"
    factors = {key: int(_number(key, values[key], 1)) if values.get(key) is not None else None for key in keys}
    if not any(factors.values()):
        factors[MICRO_BATCHES] = 1  # as DeepSpeed does
    factors = with_quotient(int(_number(TOTAL, value, 1)), {**factors, PROCESSES: translation.world_size})
    missing = missing_factors(factors)
    if missing:
        return f"it gives {missing[0]} if the number of processes is known; pass from_deepspeed(config, world_size=...)"
    translation.batch_size, translation.world_size = factors[SAMPLES], factors[PROCESSES]
    translation.micro_batches = factors[MICRO_BATCHES] or 1
    return None


def _bucket(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if STRATEGIES[translation.strategy].parameters:
        return "fully_shard reduces the gradients of one block at a time; pass shard_(blocks=...) for other units"
    each = 2 if translation.working_copies else 4  # bytes; other gradients are fp32
    size = int(_number("zero_optimization.reduce_bucket_size", value, 1)) * each
    translation.shard["bucket"] = max(size, 1000)
    return None


def _allgather_bucket(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if STRATEGIES[translation.strategy].parameters:
        return "fully_shard gathers one block at a time; pass shard_(blocks=...) for other units"
    if value == values.get("zero_optimization.reduce_bucket_size", value) and "bucket" in translation.shard:
        return None
    return "bucket= of shard_, from reduce_bucket_size, is for both"


def _offload_optimizer(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in (None, "none"):
        return None
    row = STRATEGIES[translation.strategy]
    if row.parameters:
        translation.shard["offload"] = True
        translation.notes["zero_optimization.offload_optimizer"] = "offload=True also offloads the shards of parameters"
        return None if value == "cpu" else "fully_shard offloads to host memory, not to files; offload=True is set"
    if row.states:
        return (
            f"{translation.strategy} keeps its share of the states on the device; use zero3 with offload=True, 8-bit "
            f"states (lb.optim.AdamW8bit), or ddp with lb.optim.offload_"
        )
    translation.offload_states = (
        "cpu" if value == "cpu" else values.get("zero_optimization.offload_optimizer.nvme_path")
    )
    return None if translation.offload_states else "offload to nvme needs nvme_path"


def _offload_param(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in (None, "none"):
        return None
    if not STRATEGIES[translation.strategy].parameters:
        return f"{translation.strategy} keeps all parameters on the device, as in DeepSpeed; it is for stage 3"
    translation.shard["offload"] = True
    translation.notes["zero_optimization.offload_param"] = "offload=True also offloads gradients and optimizer states"
    if value == "nvme":
        return (
            "fully_shard offloads to host memory, not to files; offload=True is set. In one process, "
            "lb.memory.stream_blocks_ stores weights in files"
        )
    return None


def _prefetch(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if not STRATEGIES[translation.strategy].parameters:
        return "it is for stage 3"
    if _number("zero_optimization.stage3_prefetch_bucket_size", value):
        translation.shard["prefetch"] = 1
        translation.notes["zero_optimization.stage3_prefetch_bucket_size"] = "prefetch counts blocks, not elements"
    return None


def _unused(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and not STRATEGIES[translation.strategy].parameters:
        translation.shard["find_unused_parameters"] = True
    return None


def _mics(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if _number("zero_optimization.mics_shard_size", value, -1) <= 0:
        return None
    translation.strategy, translation.shard["group_size"] = "hsdp", int(value)
    return None


def _quantized_weights(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and not STRATEGIES[translation.strategy].parameters:
        return "it is for stage 3"
    translation.gather = "int8" if value else None
    return None


def _quantized_gradients(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    translation.compress = "int8" if value else None
    return None


def _communication(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    dtypes = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}
    if value is None:
        return None
    if value not in dtypes:
        raise ValueError(f"from_deepspeed: communication_data_type must be one of {', '.join(dtypes)}, got {value!r}")
    if not STRATEGIES[translation.strategy].parameters:
        return "gradients are reduced in their own dtype; lb.distributed.order_gradients_(model) sums in fp32"
    translation.shard["reduce"] = dtypes[value]
    return None


def _set(name: str, key: str, least: float = 0) -> Key:
    """A key whose number is a field of the translation; 0 is none."""

    def translate(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> None:
        number = _number(key, value, least)
        setattr(translation, name, number or None)

    return Key(f"`.{name}`", translate)


def _checkpoint(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value:
        translation.checkpoint = translation.checkpoint or "block"
    return None


def _checkpoints(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value:
        translation.checkpoint = f"segments:{int(_number('activation_checkpointing.number_checkpoints', value, 1))}"
    return None


def _checkpoints_offloaded(translation: FromDeepSpeed, value: Any, values: Mapping[str, Any]) -> str | None:
    if value:
        translation.checkpoint, translation.checkpoint_to = translation.checkpoint or "block", "cpu"
    return None


_OTHER_SCHEDULES = {
    "OneCycle": "use torch.optim.lr_scheduler.OneCycleLR",
    "LRRangeTest": "use torch.optim.lr_scheduler.LambdaLR",
    "WarmupCosineLR": "use torch.optim.lr_scheduler.SequentialLR of LinearLR and CosineAnnealingLR",
}
_ZERO, _CHECKPOINTING = "zero_optimization", "activation_checkpointing"
_LIMITS = "fully_shard keeps the parameters of the computing blocks only; see blocks= and prefetch= of shard_"
_LOGS = "logging is up to the training loop; lb.memory.profile and lb.distributed.traffic measure"

KEYS: dict[str, Key] = {
    f"{_ZERO}.stage": Key("`.strategy`: `ddp`, `zero1`, `zero2-replicated`, `zero3`", _stage),
    "bf16.enabled": Key('`lb.train.mixed_(model, "bf16")`; in stage 3 also `shard_(precision=torch.bfloat16)`', _bf16),
    "fp16.enabled": Key('`lb.train.mixed_(model, "fp16")` and `lb.train.LossScaler`', _fp16),
    "fp16.initial_scale_power": _same("`init_scale` of `LossScaler`"),
    "fp16.loss_scale": _same("`init_scale` of `LossScaler`, which adapts it"),
    "fp16.loss_scale_window": _same("`growth_interval` of `LossScaler`"),
    "fp16.auto_cast": _same("`mixed_` casts inputs"),
    "fp16.hysteresis": _without("LossScaler lowers the scale at the first overflow"),
    "fp16.consecutive_hysteresis": _without("LossScaler lowers the scale at the first overflow"),
    "fp16.min_loss_scale": _without("LossScaler has no least scale; its gave_up says that no scale helps"),
    "optimizer.type": Key("the class of `.optimizer`", _optimizer),
    "optimizer.params": _same("the arguments of `.optimizer`"),
    "optimizer.legacy_fusion": _without("optimizer steps are fused"),
    "scheduler.type": Key("`.schedule(optimizer)`: `WarmupLR`, `WarmupDecayLR`", _scheduler),
    "scheduler.params": _same("arguments of `.schedule(optimizer)`"),
    "gradient_clipping": _set("clip", "gradient_clipping"),
    MICRO_BATCHES: _set("micro_batches", MICRO_BATCHES, 1),
    SAMPLES: _set("batch_size", SAMPLES, 1),
    TOTAL: Key("`.batch_size` times `.micro_batches` times `.world_size`; gives the one that is missing", _batch),
    f"{_ZERO}.reduce_bucket_size": Key("`shard_(bucket=...)` in bytes; it counts elements in DeepSpeed", _bucket),
    f"{_ZERO}.allgather_bucket_size": Key("the same `bucket`", _allgather_bucket),
    f"{_ZERO}.overlap_comm": _always("gradients are reduced during backward"),
    f"{_ZERO}.reduce_scatter": _always("sharded gradients are reduce-scattered"),
    f"{_ZERO}.contiguous_gradients": _always("gradients are reduced in contiguous buckets"),
    f"{_ZERO}.allgather_partitions": _always("parameters are all-gathered"),
    f"{_ZERO}.offload_optimizer.device": Key(
        "stage 3: `shard_(offload=True)`; stage 0: `lb.optim.offload_`", _offload_optimizer
    ),
    f"{_ZERO}.offload_optimizer.nvme_path": _same("`to=` of `lb.optim.offload_`"),
    f"{_ZERO}.offload_param.device": Key("stage 3: `shard_(offload=True)`", _offload_param),
    f"{_ZERO}.offload_param.nvme_path": _same("see `offload_param.device`"),
    **{
        f"{_ZERO}.offload_{of}.{name}": _same("host memory is pinned if there is a GPU, and buffers are sized by torch")
        for of in ("optimizer", "param")
        for name in (
            "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read", "pipeline_write",
        )
    },
    f"{_ZERO}.offload_optimizer.ratio": _without("shards of all states are offloaded, or none"),
    f"{_ZERO}.stage3_prefetch_bucket_size": Key("`shard_(prefetch=1)`, which counts blocks", _prefetch),
    f"{_ZERO}.stage3_param_persistence_threshold": _without(_LIMITS),
    f"{_ZERO}.stage3_max_live_parameters": _without(_LIMITS),
    f"{_ZERO}.stage3_max_reuse_distance": _without(_LIMITS),
    f"{_ZERO}.sub_group_size": _without("the optimizer steps parameter by parameter"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _without(
        "lb.distributed.save saves shards; lb.distributed.load reads them in one process, and lb.save_model saves that"
    ),
    f"{_ZERO}.ignore_unused_parameters": Key("stages 0 to 2: `shard_(find_unused_parameters=True)`", _unused),
    f"{_ZERO}.round_robin_gradients": _without("each gradient is sharded by rows"),
    f"{_ZERO}.elastic_checkpoint": _same("checkpoints load on any number of processes"),
    f"{_ZERO}.load_from_fp32_weights": _same("checkpoints have fp32 masters"),
    f"{_ZERO}.mics_shard_size": Key('`shard_(strategy="hsdp", group_size=...)`', _mics),
    f"{_ZERO}.mics_hierarchical_params_gather": _without("hsdp gathers within its groups only"),
    f"{_ZERO}.zero_hpz_partition_size": _without("near is strategy='hsdp', which shards within groups only"),
    f"{_ZERO}.zero_quantized_weights": Key('`lb.distributed.all_gather_(model, "int8")`', _quantized_weights),
    f"{_ZERO}.zero_quantized_gradients": Key(
        '`lb.distributed.compress_gradients_(model, "int8")`', _quantized_gradients
    ),
    f"{_ZERO}.zero_quantized_nontrainable_weights": _without('quantize frozen weights by lb.quantize_(model, "nf4")'),
    "communication_data_type": Key("stage 3: `shard_(reduce=...)`", _communication),
    "data_types.grad_accum_dtype": _without("gradients accumulate in their own dtype"),
    "prescale_gradients": _without("gradients are divided before they are summed"),
    "gradient_predivide_factor": _without("gradients are divided by the number of processes"),
    "sparse_gradients": _without("gradients are dense"),
    "zero_allow_untested_optimizer": _same("every optimizer is allowed"),
    "zero_force_ds_cpu_optimizer": _same("every optimizer is allowed"),
    f"{_CHECKPOINTING}.number_checkpoints": Key('`lb.memory.checkpoint_(model, "segments:k")`', _checkpoints),
    f"{_CHECKPOINTING}.cpu_checkpointing": Key('`lb.memory.checkpoint_(model, to="cpu")`', _checkpoints_offloaded),
    f"{_CHECKPOINTING}.contiguous_memory_optimization": Key("`lb.memory.checkpoint_(model)`", _checkpoint),
    f"{_CHECKPOINTING}.partition_activations": _without("it needs tensor parallelism"),
    f"{_CHECKPOINTING}.synchronize_checkpoint_boundary": _without("nothing has to be synchronized"),
    f"{_CHECKPOINTING}.profile": _without(_LOGS),
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler.*",
         "tensorboard.*", "wandb.*", "csv_monitor.*", "comms_logger.*"), _without(_LOGS)),
    "amp.*": _without('use lb.train.mixed_(model, "bf16") or "fp16"'),
    "torch_autocast.*": _without('use lb.train.mixed_(model, "bf16")'),
    "compression_training.*": _without("use lb.qat.prepare_ for quantization-aware training"),
    **dict.fromkeys(
        ("sparse_attention.*", "curriculum_learning.*", "data_efficiency.*", "elasticity.*", "autotuning.*", "aio.*",
         "pipeline.*", "hybrid_engine.*", "tensor_parallel.*", "checkpoint.*"), _without("lowbit has no counterpart")),
}  # fmt: skip
