"""What a recurrent layer keeps of a request, from a model's configuration alone.

A kind of recurrent layer is told by the sizes that its configuration names. The parts and their order are those of
``kvferry.vllm.state_view``, which has them from the tensors of an engine that runs; shapes are those of vLLM's
``MambaStateShapeCalculator``.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvferry.errors import SpecError

Config = dict[str, Any]
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SIZE_LIMIT = 1 << 20


class Part(NamedTuple):
    """Channels or heads of one state, over all ranks.

    Attributes:
        units: what tensor parallelism deals out whole, such as heads.
        cells: of all units; each has `cell_bytes` bytes.
        repeated: every rank holds all of it.
    """

    name: str
    units: int
    cells: int
    cell_bytes: int
    repeated: bool = False


class Projection(NamedTuple):
    """Some channels of a convolution."""

    name: str
    units: int
    channels: int
    repeated: bool = False


def _gated_delta_net(config: Config) -> tuple[list[Projection], int, tuple[int, int]]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    query_key = [Projection(name, keys, keys * key_size) for name in ("q", "k")]
    rows = config.get("linear_conv_kernel_dim", 4) - 1
    return [*query_key, Projection("v", values, values * value_size)], rows, (values, value_size * key_size)


def _mamba2(config: Config) -> tuple[list[Projection], int, tuple[int, int]]:
    heads, groups, size = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_state"]
    head_size = config.get("mamba_d_head")
    if not isinstance(head_size, int):
        head_size = config.get("mamba_expand", 2) * config["hidden_size"] // heads
    # A single group is wanted by the heads of every rank.
    shared = [Projection(name, groups, groups * size, repeated=groups == 1) for name in ("b", "c")]
    x = Projection("x", heads, heads * head_size)
    return [x, *shared], config["mamba_d_conv"] - 1, (heads, head_size * size)


def _short_convolution(config: Config) -> tuple[list[Projection], int, tuple[int, int]]:
    channels = config.get("conv_dim") or config["hidden_size"]
    return [Projection("x", channels, channels)], config["conv_L_cache"] - 1, (0, 0)


KINDS: dict[tuple[str, ...], Callable[[Config], tuple[list[Projection], int, tuple[int, int]]]] = {
    (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    ): _gated_delta_net,
    ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"): _mamba2,
    ("conv_L_cache",): _short_convolution,
}
"""By the sizes that tell a kind: its projections, the inputs that the convolution remembers of each channel, and number
and elements of the heads of its temporal state."""
OPTIONAL = ("linear_conv_kernel_dim", "conv_dim", "mamba_expand")


def state_parts(config: Config, dtype: str) -> tuple[Part, ...]:
    """The parts of a recurrent layer's state in the order in which they lie; none if no kind is known by its sizes.

    Elements are of `dtype`, those of the temporal state of the type that the configuration names for them.

    Raises:
        SpecError: a size is no positive whole number.
    """
    for keys, of in KINDS.items():
        if all(key in config for key in keys):
            _require_sizes(config, keys)
            return tuple(_parts(*of(config), config, dtype))
    return ()


def _require_sizes(config: Config, keys: tuple[str, ...]) -> None:
    for key in (*keys, *(key for key in OPTIONAL if config.get(key) is not None)):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZE_LIMIT:
            raise SpecError(f"config.json: {key}={value!r} is not a whole number from 1 to {SIZE_LIMIT}")


def _parts(
    projections: list[Projection], rows: int, temporal: tuple[int, int], config: Config, dtype: str
) -> Iterator[Part]:
    element = ELEMENT_BYTES[dtype]
    for row in range(rows):
        for name, units, channels, repeated in projections:
            yield Part(f"conv.{name}.{row}", units, channels, element, repeated)
    heads, elements = temporal
    if heads:
        named = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
        yield Part("temporal", heads, heads, elements * ELEMENT_BYTES.get(str(named), element))
