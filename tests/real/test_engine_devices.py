"""Which device an engine gets is Ray's to say, by CUDA_VISIBLE_DEVICES: nobody can name one (M15b; scaling.md 3).

So no index of a replica's own group can be taken for a device. What is left of that defect, two engines at one address,
is the check ``one_engine_an_address``.
"""

from __future__ import annotations

import pytest

from protocol.ports import EngineOptions
from real.engines.sglang_flags import BadArgument, named_argument, of_options


@pytest.mark.parametrize("argument", ["base-gpu-id=0", "--base_gpu_id=1", "device=cuda:0", "--port=30000"])
def test_a_device_or_an_address_that_is_named_is_refused(argument: str) -> None:
    with pytest.raises(BadArgument, match="is set by the project"):
        named_argument(argument)


def test_what_we_say_ourselves_names_no_device_whatever_the_rank() -> None:
    options = EngineOptions(deterministic=True, gpu="ada", attention_backend="fa3")
    for rank in range(3):
        said = of_options(options, rank, "sglang-cuda")
        assert said and not any(one.startswith(("--base-gpu", "--device", "--gpu")) for one in said)
